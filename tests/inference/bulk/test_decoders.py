"""Images are decoded in other processes, in order; one that ends its process is an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from engram.images.decode import BadImage
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view
from engram.inference.bulk.addresses import is_address
from engram.inference.bulk.decoders import Decoders, Item

PREPROCESSING = Preprocessing((16, 16), None)


class Deadly(Item):
    """An image whose decoder dies of it, as of a fault in a library."""

    def read(self) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""


@pytest.fixture
def items(tmp_path: Path) -> list[Item]:
    rng = np.random.default_rng(0)
    for i in range(6):
        Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).save(tmp_path / f"{i}.png")
    return [Item(str(tmp_path / f"{i}.png")) for i in range(6)]


@pytest.mark.system
def test_views_come_in_order_and_a_deadly_image_is_an_error(items: list[Item]) -> None:
    given = [*items[:3], Deadly("deadly.png"), *items[3:], Item("missing.png")]
    decoders = Decoders(PREPROCESSING, 2)
    try:
        found = list(decoders.decoded(given))
    finally:
        decoders.close()
    assert [one.name for one in found] == [item.name for item in given]
    assert "ended the process" in found[3].error
    assert "does not exist" in found[-1].error
    for one in found:
        if not one.error:
            assert one.view is not None
            assert (one.view == evaluation_view(one.name, PREPROCESSING)).all()


def test_without_processes_the_answers_are_the_same(items: list[Item]) -> None:
    here = list(Decoders(PREPROCESSING, 0).decoded(items))
    assert all(one.view is not None for one in here)


@pytest.mark.system
def test_a_process_does_not_import_torch() -> None:
    code = "import engram.inference.bulk.decoders, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Endless(Item):
    """An image that is waited for without end."""

    def read(self) -> bytes:
        Path(self.place).touch()
        threading.Event().wait()
        return b""


def test_a_decoder_that_waits_without_end_is_ended(tmp_path: Path) -> None:
    decoders = Decoders(PREPROCESSING, 1)
    decoders._submit([Endless(str(tmp_path / "asked"))])
    while not (tmp_path / "asked").exists():
        time.sleep(0.01)
    decoders.close()


class Odd(Item):
    """An image whose file system raises what nobody expects."""

    def read(self) -> bytes:
        raise RuntimeError("\udcff")


def test_whatever_an_image_raises_is_its_error(items: list[Item]) -> None:
    found = list(Decoders(PREPROCESSING, 0).decoded([Odd("odd"), items[0]]))
    assert found[0].error.encode().startswith(b"odd: ")
    assert found[1].view is not None


# The bytes of an image


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
