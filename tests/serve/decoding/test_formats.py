"""Seven formats are accepted, by their content; a JPEG of very many scans is not."""

from __future__ import annotations

import io

import pytest
from PIL import Image
from tests.support.serving import many_scans
from tests.support.waiting import computing_less_than

from engram.images.decode import BadImage
from engram.serve.decoding.worker import MAX_SCANS, check_format, scans


def encoded(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_the_seven_formats_are_accepted(kind: str) -> None:
    check_format(encoded(kind), "a")


@pytest.mark.parametrize("kind", ["PPM", "JPEG2000", "TGA", "ICO", "PCX", "SGI"])
def test_other_formats_are_refused_whatever_their_name(kind: str) -> None:
    with pytest.raises(BadImage, match=r"a\.png: not an image"):
        check_format(encoded(kind), "a.png")


def test_heic_is_refused_whatever_else_its_header_says() -> None:
    for header in (
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifheic",
        b"\0\0\0\x18ftypavif\0\0\0\0mif1hevc",
    ):
        with pytest.raises(BadImage, match="a: HEIC is not accepted here"):
            check_format(header + bytes(100), "a")


def test_an_empty_file_says_so() -> None:
    with pytest.raises(BadImage, match="the file is empty"):
        check_format(b"", "a.png")


def test_scans_are_counted_before_anything_is_decoded() -> None:
    assert scans(encoded("JPEG"), 10) == 1
    progressive = encoded("JPEG", progressive=True)
    assert scans(progressive, 1000) == 10
    check_format(progressive, "a.jpg")
    check_format(many_scans(MAX_SCANS), "a.jpg")
    with pytest.raises(BadImage, match="a JPEG with more than 100 scans"):
        check_format(many_scans(MAX_SCANS + 1), "a.jpg")


def test_metadata_is_not_counted() -> None:
    """A thumbnail, or a film behind the picture, can hold the same bytes."""
    picture, mark = encoded("JPEG"), b"\xff\xda\0\2" * 200
    segment = b"\xff\xe1" + (len(mark) + 2).to_bytes(2) + mark
    assert scans(picture[:2] + segment + picture[2:] + mark, 1000) == 1


@pytest.mark.parametrize("data", [b"\xff" * 10**6, b"\xff\xda" * 10**6, b"\xff\xd8" + bytes(10**6)])
def test_counting_takes_no_time_of_its_own(data: bytes) -> None:
    with computing_less_than(1):
        scans(data, MAX_SCANS + 1)
