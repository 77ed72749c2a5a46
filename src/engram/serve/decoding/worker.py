"""A decoder: reads one body, and decodes the images in it one after the other.

It runs in a process of its own, see `pool.py`. The service sends calls of methods of `BodyDecoder`,
as `multiprocessing` pickles them. Every answer is a JSON document and bytes that belong to it, not
a pickle: the service must not run what a decoder sends, whatever an image did to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from engram.images.decode import HEADER_BYTES, BadImage, LargeImage, image_size, is_heic
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_box, evaluation_view
from engram.serve.decoding.upload import Upload
from engram.serve.problems import Problem
from engram.util.text import printable
from engram.util.worker_processes import ignore_pillow_warnings

Document = dict[str, Any]
Answer = tuple[Document, bytes]
Read = Callable[[bytearray], Upload]  # a function of `upload.py` or `infer_body.py`

#: The formats that are accepted. HEIC is not, even where pillow-heif is installed: it would hand
#: strangers' files to a large decoder in C++ that Pillow does not come with.
GOOD = "Send a good JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF."
SMALLER = "Send a smaller one."

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


def send(connection: Connection, document: Document, data: bytes | bytearray = b"") -> None:
    connection.send_bytes(json.dumps(document).encode())
    connection.send_bytes(data)


def receive(connection: Connection) -> tuple[Document, bytearray]:
    """Wait for a message; EOFError if the other side has closed the connection."""
    return json.loads(connection.recv_bytes()), bytearray(connection.recv_bytes())


def work(connection: Connection, memory: int, seconds: int) -> None:
    """Answer messages until the service closes the connection, or memory runs out.

    `memory` is what this process may have beyond what it has now, in bytes; `seconds` the limit for
    one message, for a process whose service has ended.
    """
    # Signals of a terminal reach all: the service still needs decoders for what it has accepted.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for output in (1, 2):  # what parsers print about a stranger's bytes is nothing for the log
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # where the system can hold it
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    ignore_pillow_warnings()
    decoder = BodyDecoder()
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if message is None:  # the request has ended
                decoder.images.clear()
                continue
            what, method, arguments, has_body = message
            if has_body:
                arguments += (bytearray(connection.recv_bytes()),)
            signal.alarm(seconds)
            answer, data = decoder.answer(what, method, *arguments)
            signal.alarm(0)
            send(connection, answer, data)
            if answer.get("ending"):
                return


class BodyDecoder:
    """The images of the last body; `shape` is given if they are arrays of float32 already."""

    def __init__(self) -> None:
        self.images: list[tuple[str, bytes]] = []
        self.shape: tuple[int, ...] | None = None

    def answer(self, what: str, method: Callable[..., Answer], *arguments: Any) -> Answer:
        """The result of a method about `what`; or a refusal, and why this process has to end."""
        ending = ""
        try:
            return method(self, *arguments)
        except Problem as problem:
            return {"status": problem.status, "refused": problem.sentence}, b""
        except (BadImage, MemoryError) as error:
            sentence, send = str(error).rstrip("."), GOOD
            if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
                sentence, ending = f"{what}: it takes too much memory to read", "out of memory"
            if ending or isinstance(error, LargeImage):
                send = SMALLER
        except BaseException as error:  # of a parser in Rust that panics, too
            sentence, send = f"{what}: it cannot be read", GOOD
            ending = printable(f"{type(error).__name__}: {error}", 200)
        return {"status": 422, "refused": f"{sentence}. {send}", "ending": ending}, b""

    def read(self, read: Read, body: bytearray) -> Answer:
        """Keep the images of a body; gives their names, and its options."""
        upload = read(body)
        self.images, self.shape = upload.images, upload.shape
        options = upload.options.model_dump(exclude={"images", "inputs", "vectors"})
        return {"names": [name for name, _ in self.images], "options": options}, b""

    def decode(self, preprocessing: Preprocessing, max_pixels: int) -> Answer:
        """The fields of the response about the next image, and its view."""
        name, data = self.images.pop(0)
        if self.shape is not None:
            return {"fields": {}, "shape": self.shape, "dtype": "float32"}, data
        check_format(data, name)
        width, height = image_size(data, name=name, max_pixels=max_pixels)
        view = np.ascontiguousarray(evaluation_view(data, preprocessing, name=name))
        box = [round(x, 3) for x in evaluation_box(width, height, preprocessing)]
        fields = {"name": name, "width": width, "height": height, "view": box}
        return {"fields": fields, "shape": view.shape, "dtype": "uint8"}, view.tobytes()


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
