"""Hostile pictures sent to the service, each followed by a good request."""

from __future__ import annotations

import io
import random
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from benchmarks.attacks.record import Record
from benchmarks.attacks.service import Attacked, attacked_service
from benchmarks.serve.malformed import bomb

REFUSED = (200, 400, 413, 415, 422, 503)  # 200 too: an odd picture may still be one
MOST_SECONDS = 40


def encoded(kind: str, rng: random.Random, side: int = 64, **options: object) -> bytes:
    pixels = np.random.default_rng(rng.randrange(1000)).integers(0, 256, (side, side, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, kind, **options)
    return file.getvalue()


def many_scans(rng: random.Random) -> bytes:
    """A progressive JPEG that refines a large picture again and again."""
    data = encoded("JPEG", rng, progressive=True)
    scan = data.rindex(b"\xff\xda")
    return with_size(data[:-2], 7000) + data[scan:-2] * rng.choice((101, 500, 4000)) + b"\xff\xd9"


def with_size(data: bytes, side: int) -> bytes:
    """A JPEG whose header declares `side` × `side` pixels."""
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + 5
    return data[:at] + struct.pack(">HH", side, side) + data[at + 4 :]


def other_size(rng: random.Random) -> bytes:
    return with_size(encoded("JPEG", rng), rng.choice((0, 7000, 65_535)))


def huge_png(rng: random.Random) -> bytes:
    return bomb(rng.randrange(10_000, 60_000))


def ppm_comment(rng: random.Random) -> bytes:
    size = rng.choice((100_000, 5_000_000, 20_000_000))
    return b"P6\n#" + b"x" * size + b"\n4 4\n255\n" + bytes(48)


def png_text(rng: random.Random) -> bytes:
    """A PNG with a text that is a thousand times as long when it is inflated."""
    data = encoded("PNG", rng)
    body = b"zTXtx\x00\x00" + zlib.compress(bytes(rng.choice((1, 60)) * 1_000_000))
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk + data[33:]


def gif_frames(rng: random.Random) -> bytes:
    file = io.BytesIO()
    frames = [Image.new("P", (200, 200), i) for i in range(rng.choice((2, 200)))]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def tiff_of_itself(rng: random.Random) -> bytes:
    """A TIFF whose next directory is itself, with an entry that counts to four billion."""
    entry = struct.pack("<HHII", rng.choice((256, 257, 273, 279, 700)), 4, 2**32 - 1, 8)
    return b"II*\x00" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 8)


def truncated(rng: random.Random) -> bytes:
    data = encoded(rng.choice(("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP")), rng)
    return data[: rng.randrange(1, len(data))]


def spoiled(rng: random.Random) -> bytes:
    data = bytearray(encoded(rng.choice(("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP")), rng))
    for _ in range(rng.choice((1, 10, 200))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def wrong_type(rng: random.Random) -> bytes:
    return rng.choice((
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n",
        b"%PDF-1.7\n" + rng.randbytes(300),
        b"PK\x03\x04" + rng.randbytes(300),
        b"\x7fELF" + rng.randbytes(300),
        b"#!/bin/sh\ntouch x\n",
        encoded("ICO", rng, side=32),
        encoded("PCX", rng),
        encoded("TGA", rng),
        b"GIF89a" + rng.randbytes(50),
        rng.randbytes(1000),
        b"",
    ))  # fmt: skip


def large_bmp(rng: random.Random) -> bytes:
    data = bytearray(encoded("BMP", rng, side=4))
    data[18:26] = struct.pack("<ii", rng.choice((50_000, 2**31 - 1)), -50_000)
    return bytes(data)


def just_too_large(rng: random.Random) -> bytes:
    """A picture within the limit of bytes that decodes to more than the limit of pixels."""
    file = io.BytesIO()
    Image.new("1", (rng.choice((7072, 9000)), 7100)).save(file, "PNG")
    return file.getvalue()


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    many_scans, huge_png, ppm_comment, truncated, spoiled,
    wrong_type, png_text, gif_frames, tiff_of_itself, large_bmp, just_too_large,
    other_size,
)  # fmt: skip


def attack(service: Attacked, record: Record, count: int) -> None:
    """Send so many pictures, the kinds in turn."""
    rng = random.Random(2)
    for i in range(count):
        make = KINDS[i % len(KINDS)]
        began = time.monotonic()
        status, body = service.send(make(rng), timeout=MOST_SECONDS)
        problem = service.problem_of_good_request()
        if status not in REFUSED or b"Traceback" in body:
            problem = f"status {status} in {time.monotonic() - began:.0f} s: {body[:100]!r}"
        record.add(f"picture {i}, {make.__name__}", problem)


def run(count: int) -> Record:
    record = Record()
    with attacked_service(record) as service:
        attack(service, record, count)
    return record
