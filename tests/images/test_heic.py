"""HEIC photographs are read where pillow-heif is installed, upright, and within the same limits."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.pictures import CORNER, encoded

from engram.images.decode import BadImage, LargeImage, image_size, is_heic, read_image
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view

pytest.importorskip("pillow_heif")

# Where the corner that is stored top left is to be seen, by EXIF orientation.
CORNERS = {1: "left top", 2: "right top", 3: "right bottom", 4: "left bottom"}
CORNERS |= {5: "left top", 6: "right top", 7: "right bottom", 8: "left bottom"}


@pytest.mark.parametrize("kind", ["HEIF", "AVIF"])
@pytest.mark.parametrize("orientation", CORNERS)
def test_a_photograph_is_turned_once(kind: str, orientation: int) -> None:
    data = encoded(kind, orientation)
    size = (48, 64) if orientation >= 5 else (64, 48)
    assert image_size(data) == size
    image = read_image(data)
    assert image.size == size
    wide, high = image.size
    places = {
        f"{x} {y}": image.getpixel((3 if x == "left" else wide - 4, 3 if y == "top" else high - 4))
        for x in ("left", "right")
        for y in ("top", "bottom")
    }
    red = {name for name, pixel in places.items() if np.abs(np.subtract(pixel, CORNER)).max() < 40}
    assert red == {CORNERS[orientation]}


def test_a_photograph_is_read_from_a_path_bytes_and_an_open_file(tmp_path: Path) -> None:
    data = encoded("HEIF", 6)
    path = tmp_path / "IMG_0001.HEIC"
    path.write_bytes(data)
    whole = Preprocessing((48, 48), None)
    views = [evaluation_view(source, whole) for source in (path, data, io.BytesIO(data))]
    assert all((view == views[0]).all() for view in views)


def test_the_limit_of_pixels_holds_before_anything_is_decoded() -> None:
    with pytest.raises(LargeImage, match="64x48 pixels"):
        image_size(encoded("HEIF"), max_pixels=1000)


def test_damaged_photographs_raise_nothing_but_bad_image() -> None:
    data = encoded("HEIF")
    rng = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(data)
        for place in rng.integers(12, len(data), 6):
            broken[place] = rng.integers(256)
        with contextlib.suppress(BadImage):
            read_image(bytes(broken[: rng.integers(30, len(data) + 1)]))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.images.decode.can_read_heic", lambda: False)
    with pytest.raises(BadImage, match=r"needs pillow-heif: pip install pillow-heif"):
        read_image(encoded("HEIF"))


def test_only_files_with_hevc_in_their_header_are_heic() -> None:
    assert is_heic(encoded("HEIF"))
    assert is_heic(b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic")
    assert not is_heic(b"\0\0\0\x14ftypmif1\0\0\0\0mif1heic")  # beyond the end of the box
    for kind in ("AVIF", "PNG"):
        assert not is_heic(encoded(kind))
    assert not is_heic(b"")


@pytest.mark.system
def test_the_package_is_imported_when_a_photograph_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.heic"
    path.write_bytes(encoded("HEIF"))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    script = (
        "import sys; from engram.images.decode import read_image; read_image(sys.argv[1]); "
        "print('pillow_heif' in sys.modules)"
    )
    for name, imported in (("a.png", "False"), ("a.heic", "True")):
        command = [sys.executable, "-c", script, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == imported
