"""The image formats that the service accepts, recognised by content, and the scans of a JPEG.

HEIC is not among them, even where pillow-heif is installed: it would hand strangers' files to a
large decoder in C++ that Pillow does not come with.
"""

from __future__ import annotations

import re

from engram.images.decode import HEADER_BYTES, BadImage, is_heic

#: For sentences.
FORMATS = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
#: Cameras and encoders write about ten. Every scan goes over all pixels again, so thousands of
#: them make a small file take minutes.
MAX_SCANS = 100

_SIGNATURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP|GIF8[79]a|BM|II[*+]\0|MM\0[*+]"
    rb"|....ftyp(avif|avis|mif1|msf1)",
    re.DOTALL,
)
# A marker is 0xFF and a byte that is not 0; more 0xFF may precede it. After the header of a scan
# the compressed pixels follow, in which 0xFF is always followed by 0 or by a restart marker.
_MARKER = re.compile(rb"\xff([\x01-\xfe])")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}  # TEM, restarts, start of image


def check_format(data: bytes, name: str) -> None:
    """Refuse what is in none of the formats, and a JPEG of too many scans, with a BadImage."""
    if not data:
        raise BadImage(f"{name}: the file is empty")
    if is_heic(data[:HEADER_BYTES]):  # the test after which `images.decode` would open it
        raise BadImage(f"{name}: HEIC is not accepted here")
    if not _SIGNATURES.match(data):
        raise BadImage(f"{name}: not an image that can be read")
    if data.startswith(b"\xff\xd8") and scans(data, MAX_SCANS + 1) > MAX_SCANS:
        raise BadImage(
            f"{name}: a JPEG with more than {MAX_SCANS} scans, which takes too long to decode"
        )


def scans(data: bytes, most: int) -> int:
    """The number of scans of a JPEG, counted up to `most`."""
    count = position = 0
    while count < most:
        marker = _MARKER.search(data, position)
        if marker is None or (code := marker[1][0]) == _END_OF_IMAGE:
            break
        position = marker.end()
        if code in _WITHOUT_LENGTH:
            continue
        count += code == _START_OF_SCAN
        position += max(2, int.from_bytes(data[position : position + 2]))
    return count
