"""Settings as TOML: what was written is what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engram import EngramError
from engram.util.documents import read_toml, to_toml


def test_what_was_written_is_read(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "lr": 1e-07,
        "steps": 0,
        "refit": True,
        "text": 'a "quoted" \\ path\nwith\tcontrol \x00\x1f\x7f and 🌷',
        "cells": [1, 5],
        "extends": ["a=b.safetensors", ""],
        "none": [],
    }
    path = tmp_path / "x.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    assert read_toml(path) == settings


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match=r"no\.toml cannot be read \(No such file"):
        read_toml(tmp_path / "no.toml")
    path = tmp_path / "x.toml"
    for data in (b"epochs: 10\n", b"\xff\xfe"):
        path.write_bytes(data)
        with pytest.raises(EngramError, match=r"x\.toml is no TOML"):
            read_toml(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("x = " + "{a=" * 3000 + "1" + "}" * 3000, "nested too deeply"),
        (f"x{'.a' * 30} = 1", "nested more than"),
        (f"epochs = {'9' * 5001}", "thousands of digits"),
        (f"epochs = 0x{'f' * 9000}", "64 bits"),
        ("seeds = 99999999999999999999", "64 bits"),
        ("lr = inf", "finite"),
        ("# " + "x" * 4_000_000, "larger than 4 MB"),
    ],
    ids=["lists", "tables", "dots", "digits", "hex", "large", "infinite", "long"],
)
def test_what_holds_no_settings_is_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(EngramError, match=reason):
        read_toml(tmp_path / "x.toml")
