"""Decode images safely: any bytes give an image, or a BadImage that says what is wrong.

The size is read from the header before anything is decoded, only formats that start no other
program are opened, and whatever the decoder raises becomes a BadImage. HEIC, the photographs of
iPhones, is tried last, with pillow-heif: only a file whose header declares pictures compressed with
HEVC gets to that library.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import IO, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from engram.errors import EngramError
from engram.util.files import open_regular

Pixels: TypeAlias = npt.NDArray[np.uint8]  # (height, width, 3)

#: An image to decode: a path, encoded bytes, an open file, an image of Pillow, or pixels.
ImageSource: TypeAlias = (
    str | os.PathLike[str] | bytes | IO[bytes] | Image.Image | npt.NDArray[np.uint8]
)

#: The most pixels an image may have, read from its header before anything is decoded: 537 MB as
#: RGB, and the size at which Pillow itself refuses. No phone takes larger photographs.
MAX_PIXELS = 178_956_970
#: The most bytes an encoded image may have, declared and really read: 256 MiB.
MAX_IMAGE_BYTES = 2**28

Image.init()
#: The formats that are opened. Pillow knows more; some of them start other programs.
FORMATS: list[str] = [
    name
    for name in ("JPEG", "PNG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
    if name in Image.OPEN
]

#: Suffixes of HEIC files.
HEIC_SUFFIXES = (".heic", ".heif", ".hif")
#: Advice where pillow-heif is missing, for sentences.
HEIC_NEEDS = "reading HEIC needs pillow-heif: pip install pillow-heif"
#: Bytes of a file that `is_heic` looks at.
HEADER_BYTES = 256
_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}

_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(EngramError):
    """An image that cannot be used.

    The message is "NAME: reason" without a full stop, so that it can be listed or be part of a
    sentence.
    """


class LargeImage(BadImage):
    """An image with more pixels or bytes than are allowed."""


def read_image(source: ImageSource, *, name: str | None = None) -> Image.Image:
    """Decode an image as RGB, upright. Whatever is wrong with it is a BadImage.

    Transparency is laid over white, 16-bit gray is scaled to 8 bits, an animation gives its first
    frame, the EXIF orientation is applied. `name` is what the error calls the image.
    """
    with opened(source, name) as image:
        return upright(to_rgb(image), orientation(image))


@contextmanager
def opened(
    source: ImageSource, name: str | None, max_pixels: int = MAX_PIXELS
) -> Iterator[Image.Image]:
    """An image with only its header read; anything Pillow raises inside becomes a BadImage."""
    if name is None:
        name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the given image"
    try:
        if isinstance(source, Image.Image):
            yield source
        elif isinstance(source, np.ndarray):
            yield Image.fromarray(source)
        else:
            with _stream(source, name) as stream, _open(stream, name) as image:
                if image.width * image.height > max_pixels:
                    raise LargeImage(
                        f"{name}: {image.width}x{image.height} pixels are more than the limit "
                        f"of {max_pixels:,}"
                    )
                yield image
    except EngramError:
        raise
    except FileNotFoundError as error:
        raise BadImage(f"{name}: the file does not exist") from error
    except Image.DecompressionBombError as error:
        raise LargeImage(f"{name}: more than the limit of {max_pixels:,} pixels") from error
    except UnidentifiedImageError as error:
        empty = isinstance(source, (str, os.PathLike)) and os.path.getsize(source) == 0
        reason = "the file is empty" if empty or source == b"" else "not an image that can be read"
        raise BadImage(f"{name}: {reason}") from error
    except OSError as error:
        raise BadImage(f"{name}: {error.strerror or error}") from error
    except Exception as error:  # on hostile bytes Pillow's decoders raise nearly anything
        raise BadImage(f"{name}: {str(error) or type(error).__name__}") from error


@contextmanager
def _stream(source: str | os.PathLike[str] | bytes | IO[bytes], name: str) -> Iterator[IO[bytes]]:
    """Encoded bytes as an open file, within the limit; a path must be that of a regular file."""
    if isinstance(source, bytes):
        check_bytes(len(source), name)
        yield io.BytesIO(source)
    elif isinstance(source, (str, os.PathLike)):
        with open_regular(source) as file:
            check_bytes(os.fstat(file.fileno()).st_size, name)
            yield file
    else:
        yield source


def check_bytes(size: int, name: str) -> None:
    """Refuse an encoded image of more than `MAX_IMAGE_BYTES`."""
    if size > MAX_IMAGE_BYTES:
        raise LargeImage(f"{name}: {size:,} bytes are more than the limit of {MAX_IMAGE_BYTES:,}")


def read_encoded(file: IO[bytes], name: str) -> bytes:
    """The rest of a file within the limit, whatever size it declares."""
    data = file.read(MAX_IMAGE_BYTES + 1) or b""  # None: nothing yet, of what is no real file
    if len(data) > MAX_IMAGE_BYTES:
        raise LargeImage(f"{name}: more than the limit of {MAX_IMAGE_BYTES:,} bytes")
    return data


def read_image_file(path: str | os.PathLike[str], name: str) -> bytes:
    """The bytes of an encoded image; more than the limit, or no regular file, is a BadImage."""
    try:
        with _stream(path, name) as file:
            return read_encoded(file, name)
    except FileNotFoundError as error:
        raise BadImage(f"{name}: the file does not exist") from error
    except (OSError, ValueError) as error:
        raise BadImage(f"{name}: {getattr(error, 'strerror', None) or error}") from error


def _open(stream: IO[bytes], name: str) -> Image.Image:
    try:
        return Image.open(stream, formats=FORMATS)
    except UnidentifiedImageError:
        stream.seek(0)
        if not is_heic(stream.read(HEADER_BYTES)):
            raise
    if not can_read_heic():
        raise BadImage(f"{name}: {HEIC_NEEDS}")
    return Image.open(stream, formats=[_heic_format()])


def is_heic(data: bytes) -> bool:
    """Whether these first bytes of a file declare pictures compressed with HEVC."""
    if data[4:8] != b"ftyp":
        return False
    size = min(int.from_bytes(data[:4]), HEADER_BYTES)
    major, compatible = data[8:12], data[16:size]
    return not _BRANDS.isdisjoint([major, *(compatible[i : i + 4] for i in range(0, size, 4))])


@cache
def can_read_heic() -> bool:
    """Whether pillow-heif is installed."""
    return find_spec("pillow_heif") is not None


@cache
def _heic_format() -> str:
    """Register pillow-heif's reader with Pillow, and return the name that it has there."""
    from pillow_heif import HeifImageFile, register_heif_opener

    register_heif_opener()
    return str(HeifImageFile.format)


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode the pixels and convert them to 8-bit RGB, transparency over white."""
    image.load()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16 bits, whatever the container
        return _gray(image, 65535)
    if image.mode == "F":
        return _gray(image, 1)
    if image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return white
    return image.convert("RGB")


def _gray(image: Image.Image, brightest: int) -> Image.Image:
    values = np.asarray(image)
    if not (values.min() >= 0 and values.max() <= brightest):
        raise ValueError(
            f"gray values from {values.min():g} to {values.max():g}; expected 0 to {brightest}"
        )
    gray = np.empty(values.shape, np.uint8)
    chunk = 2**16  # at a time: float64 of all pixels would take 8 bytes for each
    for start in range(0, values.size, chunk):
        part = values.reshape(-1)[start : start + chunk].astype(np.float64)
        gray.reshape(-1)[start : start + chunk] = np.rint(part * (255 / brightest))
    return Image.fromarray(gray).convert("RGB")


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 is upright."""
    if image.format in ("TIFF", "HEIF"):  # turned by the decoder, which gives the upright size
        return 1
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # broken metadata does not make the image bad
        return 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """The image turned and mirrored as its EXIF orientation demands."""
    turn = _ORIENTATIONS.get(orientation)
    return image if turn is None else image.transpose(turn)


def image_size(
    source: ImageSource, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """(width, height) of an image when it is upright; only its header is read."""
    with opened(source, name, max_pixels) as image:
        turned = orientation(image) >= 5
        return (image.height, image.width) if turned else (image.width, image.height)
