"""An image has its bytes, or is read from its path or address."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from engram.images.decode import BadImage
from engram.inference.bulk.addresses import is_address
from engram.inference.bulk.items import Item


def test_the_bytes_are_those_given_or_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"of the file")
    assert Item(str(path)).read() == b"of the file"
    assert Item(str(path), b"given").read() == b"given"
    with pytest.raises(BadImage, match="does not exist"):
        Item(str(tmp_path / "missing.png")).read()


def test_an_address_is_read_from_its_file_system() -> None:
    with fsspec.open("memory://bucket/image.png", "wb") as file:
        file.write(b"far away")
    assert is_address("memory://bucket/image.png")
    assert not is_address("bucket/image.png")
    assert Item("memory://bucket/image.png").read() == b"far away"
