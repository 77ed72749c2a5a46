"""Images of every format become the right pixels, and bad ones an error that names them."""

import io
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.support.images import encoded, gradient

from engram.export import standalone
from engram.images.decode import (
    MAX_IMAGE_BYTES,
    MAX_PIXELS,
    BadImage,
    image_size,
    read_encoded,
    read_image,
    read_image_file,
)
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view

SMALL = Preprocessing(size=(8, 8), resize=10)
SQUASH = Preprocessing(size=(8, 8), resize=None)


def pixel(image: Image.Image, x: int = 0, y: int = 0) -> tuple[int, ...]:
    assert image.mode == "RGB"
    value = image.getpixel((x, y))
    assert isinstance(value, tuple)
    return value


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_usual_format_is_read_as_rgb(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"image.{format.lower()}"
    gradient().save(path, format)
    for source in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes())):
        image = read_image(source)
        assert (image.mode, image.size) == ("RGB", (40, 30))
        assert np.abs(np.asarray(image).astype(int) - np.asarray(gradient())).mean() < 8


def test_cmyk_jpeg_has_its_colours() -> None:
    cmyk = Image.new("RGB", (16, 16), (200, 30, 30)).convert("CMYK")
    red, green, blue = pixel(read_image(encoded(cmyk, "JPEG", quality=95)), 8, 8)
    assert red > 150
    assert max(green, blue) < 80


def test_sixteen_bit_gray_is_scaled_not_clipped() -> None:
    deep = Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16))
    image = read_image(encoded(deep, "PNG"))
    assert [pixel(image, x)[0] for x in range(4)] == [0, 1, 128, 255]


def test_a_pgm_of_sixteen_bits_is_scaled_too() -> None:
    pgm = b"P5 2 1 65535\n" + struct.pack(">2H", 0, 32896)
    assert pixel(read_image(pgm), 1) == (128, 128, 128)


@pytest.mark.parametrize("kind", ["<u2", ">u2", "<i4", "<f4"])
def test_deep_gray_is_exact_and_takes_little_memory(kind: str) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (300, 700)).astype(kind)
    values.flat[:65536] = np.arange(65536)  # every value there is
    brightest = 1 if kind == "<f4" else 65535
    values = (values / (65535 / brightest)).astype(kind)
    modes = {"<u2": "I;16", ">u2": "I;16B", "<i4": "I", "<f4": "F"}
    image = Image.frombytes(modes[kind], (700, 300), values.tobytes())
    expected = np.rint(values.astype(np.float64) * (255 / brightest)).astype(np.uint8)
    for read in (read_image, lambda i: standalone.decode(i, SQUASH.to_dict())[0]):
        tracemalloc.start()
        found = np.asarray(read(image))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(found, np.stack([expected] * 3, axis=-1))
        assert peak < 16 * values.size, peak / values.size  # bytes a pixel


def test_float_gray_outside_zero_to_one_is_refused() -> None:
    bright = encoded(Image.fromarray(np.array([[0.0, 7.0]], dtype=np.float32)), "TIFF")
    with pytest.raises(BadImage, match="gray values from 0 to 7"):
        read_image(bright)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode: str) -> None:
    if mode == "P":
        image = Image.new("P", (4, 4), 0)
        image.putpalette([10, 20, 30, 40, 50, 60])
        data = encoded(image, "PNG", transparency=0)
    else:
        data = encoded(Image.new(mode, (4, 4), 0), "PNG")
    assert pixel(read_image(data)) == (255, 255, 255)


def test_half_transparent_red_over_white_is_pink() -> None:
    data = encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128)), "PNG")
    assert pixel(read_image(data)) == (255, 127, 127)


def test_an_opaque_palette_keeps_its_colours() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    assert pixel(read_image(encoded(image, "PNG"))) == (40, 50, 60)


def test_an_animation_gives_its_first_frame() -> None:
    first, second = Image.new("RGB", (5, 5), "red"), Image.new("RGB", (5, 5), "blue")
    data = encoded(first, "GIF", save_all=True, append_images=[second])
    assert pixel(read_image(data)) == (255, 0, 0)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(orientation: int, format: str) -> None:
    turns = Image.Transpose
    inverse = [
        None,
        turns.FLIP_LEFT_RIGHT,
        turns.ROTATE_180,
        turns.FLIP_TOP_BOTTOM,
        turns.TRANSPOSE,
        turns.ROTATE_90,
        turns.TRANSVERSE,
        turns.ROTATE_270,
    ][orientation - 1]
    upright = gradient()
    stored = upright if inverse is None else upright.transpose(inverse)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))
    assert image_size(data) == upright.size
    assert np.array_equal(np.asarray(read_image(data)), np.asarray(upright))
    assert np.array_equal(evaluation_view(data, SMALL), evaluation_view(upright, SMALL))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_exif_does_not_make_an_image_bad() -> None:
    data = encoded(gradient(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    expected = read_image(encoded(gradient(), "JPEG"))
    assert np.array_equal(np.asarray(read_image(data)), np.asarray(expected))


def test_one_pixel_is_an_image() -> None:
    view = evaluation_view(encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG"), SMALL)
    assert view.shape == (8, 8, 3)
    assert (view == (9, 8, 7)).all()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header claims a size and whose body is nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


BAD = {
    "zero.jpg": (b"", "the file is empty"),
    "text.jpg": (b"this is not an image", "not an image"),
    "truncated.jpg": (encoded(gradient(400, 300), "JPEG")[:3000], "truncated"),
    "truncated.png": (encoded(gradient(400, 300), "PNG")[:500], "truncated"),
    "bomb.png": (png_of_size(60000, 60000), f"limit of {MAX_PIXELS:,}"),
    "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    data, reason = BAD[name]
    path = tmp_path / name
    path.write_bytes(data)
    for attempt in (read_image, lambda source: evaluation_view(source, SMALL)):
        with pytest.raises(BadImage, match=reason) as caught:
            attempt(path)
        assert str(caught.value).startswith(str(path))
    with pytest.raises(BadImage, match="row 7"):
        read_image(data, name="row 7")


def test_a_missing_file_and_a_folder_are_errors_that_name_it(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"gone\.jpg: the file does not exist"):
        read_image(tmp_path / "gone.jpg")
    with pytest.raises(BadImage, match="folder"):
        read_image(tmp_path)


def test_the_pixel_limit_is_checked_before_decoding() -> None:
    with pytest.raises(BadImage, match="40x30 pixels"):
        image_size(encoded(gradient(), "JPEG"), max_pixels=1000)


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@given(st.binary(max_size=64), st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "TIFF"]), st.data())
def test_damaged_bytes_raise_nothing_but_bad_image(
    noise: bytes, format: str, data: st.DataObject
) -> None:
    content = bytearray(encoded(gradient(), format))
    start = data.draw(st.integers(0, len(content)))
    content[start : start + len(noise)] = noise
    try:
        result = read_image(bytes(content), name="damaged").mode
    except BadImage as error:
        result = str(error).split(" ")[0]
    assert result in ("RGB", "damaged:")


def test_what_has_no_end_is_a_bad_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    for path in ("pipe.png", "self.png", "sparse.png", "/dev/zero"):
        for read in (read_image, image_size, lambda path: read_image_file(path, str(path))):
            with pytest.raises(BadImage, match=path):
                read(tmp_path / path)


class _Endless(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        assert size >= 0
        return b"\0" * size


def test_bytes_have_a_limit_whatever_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.images.decode.MAX_IMAGE_BYTES", 1000)
    with pytest.raises(BadImage, match="limit"):
        read_image(b"\0" * 1001)
    with pytest.raises(BadImage, match="limit"):
        read_encoded(cast("IO[bytes]", _Endless()), "x")
