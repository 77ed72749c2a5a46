"""Addresses on the Hub, and what it refuses."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from engram import EngramError
from engram.util import hub
from engram.util.hub import HubAddress, parse_hub_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hf:ann/garden", HubAddress("ann/garden")),
        ("hf:ann/garden/", HubAddress("ann/garden")),
        ("hf:ann/garden@v1", HubAddress("ann/garden", "v1")),
        ("hf:ann/garden/a.safetensors", HubAddress("ann/garden", None, "a.safetensors")),
        ("hf:ann/garden@v1/x/a.safetensors", HubAddress("ann/garden", "v1", "x/a.safetensors")),
        ("hf:a/b/c#01234567", HubAddress("a/b", None, "c", "01234567")),
        (r"hf:ann\garden@v1\c", HubAddress("ann/garden", "v1", "c")),  # through a Path of Windows
    ],
)
def test_addresses(text: str, address: HubAddress) -> None:
    assert parse_hub_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:a", "hf:/a/b", "hf:a/b#xyz", "hf:a/b#0123", "hf:a/b/../c", "hf:a/b@", "hf:a b/c"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(EngramError, match="is not an address on the Hub"):
        parse_hub_address(text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GatedRepoError, "gated"),
        (RepositoryNotFoundError, "hf auth login"),
        (RevisionNotFoundError, "revision"),
        (ConnectionResetError, "could not be fetched"),
        (TimeoutError, "could not be fetched"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(
    error: type[Exception], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(EngramError, match=expected) as refused:
        hub.fetch("owner/name", ["config.json"], "v9")
    assert "\n" not in str(refused.value)


def test_a_name_with_an_owner_is_whole() -> None:
    assert hub.own_repo("ann/garden") == "ann/garden"
