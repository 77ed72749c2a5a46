"""HEIC, the photographs of iPhones: read by pillow-heif, where the extra `heic` installed it.

pillow-heif is imported when the first such file is opened. A file is HEIC if its header says that
it holds pictures compressed with HEVC; nothing else gets to that library.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

#: How the names of such files end.
HEIC_SUFFIXES = (".heic", ".heif", ".hif")
#: What to do where pillow-heif is missing, for sentences.
HEIC_NEEDS = "reading HEIC needs pillow-heif: pip install 'engram-vit[heic]'"
#: How many bytes of a file `is_heic` looks at.
HEADER_BYTES = 256

_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}


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
def heic_format() -> str:
    """Register pillow-heif's reader with Pillow, and return the name that it has there."""
    from pillow_heif import HeifImageFile, register_heif_opener

    register_heif_opener()
    return str(HeifImageFile.format)
