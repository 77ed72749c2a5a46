"""Settings as TOML: what was written is what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engram import EngramError
from engram.util.toml import read_toml, to_toml


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
        with pytest.raises(EngramError, match=r"x\.toml is no TOML \(.*\); write lines such as"):
            read_toml(path)
