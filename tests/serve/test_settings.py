"""Settings that cannot work are refused with a sentence."""

from __future__ import annotations

import pytest

from engram import EngramError
from engram.serve.service_settings import Settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"engine": "fast"}, "engine is 'fast'; it can be torch, onnx, onnx-int8, "),
        ({"port": 70_000}, "port is 70000; it can be 65535 at most."),
        ({"host": 5}, "host is 5; it must be text."),
        ({"allow_host": ("a:80",)}, "allow_host is 'a:80'; it must be a name or an address"),
        ({"allow_host": "a"}, "allow_host is 'a'; it must be a list"),
        ({"trust_proxy": ("proxy",)}, "trust_proxy is 'proxy'; it must be an address such as"),
        ({"trust_proxy": ("10.0.0.1/8",)}, "trust_proxy is '10.0.0.1/8'; it must be an address"),
        ({"open": 1}, "open is 1; it must be true or false"),
        ({"log": "xml"}, "log is 'xml'; it can be text, json."),
        ({"max_images": 300}, "max_images is 300, but only 256 images may wait"),
        ({"connections": 50}, "client_connections is 100, but only 50 connections may be open"),
        ({"max_bodies": 1000}, "max_body is 64000000, but only 1000 bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(EngramError) as caught:
        Settings(**settings)  # type: ignore[arg-type]
    assert str(caught.value).startswith(expected)
