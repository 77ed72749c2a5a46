"""How large images are, from the headers of a few."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from engram.data.datasets import load
from engram.data.overview import typical_side


def test_the_median_of_the_longer_sides(tmp_path: Path) -> None:
    for i, size in enumerate([(30, 20), (40, 90), (64, 50), (3000, 10), (12, 12)]):
        for name in ("a", "b"):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", size).save(tmp_path / name / f"{i}.png")
    assert typical_side(load(tmp_path)) == 64


def test_only_headers_are_read_and_bad_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (50, 40)).save(tmp_path / name / "1.png")
        whole = (tmp_path / name / "1.png").read_bytes()
        (tmp_path / name / "1.png").write_bytes(whole[:60])  # its pixels are missing
        (tmp_path / name / "2.png").write_bytes(b"no image")
    assert typical_side(load(tmp_path)) == 50
    for name in ("a", "b"):
        (tmp_path / name / "1.png").unlink()
    assert typical_side(load(tmp_path)) is None


def test_arrays_have_the_size_of_their_shape(tmp_path: Path) -> None:
    x, y = np.zeros((4, 28, 20), np.uint8), np.arange(4) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    assert typical_side(load(tmp_path / "a.npz")) == 28
