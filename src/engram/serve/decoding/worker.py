"""A decoder: reads one body, and decodes the images in it one after the other.

It runs in a process of its own, see `pool.py`, and answers every message with one, except `forget`.
A message is a JSON document, and bytes that belong to it. Not pickle: the service must not run what
a decoder sends, whatever an image did to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from engram.images.decode import BadImage, LargeImage, image_size
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_box, evaluation_view
from engram.serve.decoding.formats import FORMATS, check_format
from engram.serve.decoding.infer_body import read_inference, read_vectors
from engram.serve.decoding.upload import read_upload
from engram.serve.problems import Problem
from engram.serve.routes.schemas import OPTIONS, TeachOptions
from engram.util.text import printable
from engram.util.worker_processes import ignore_pillow_warnings

Document = dict[str, Any]

GOOD, SMALLER = f"Send a good {FORMATS}.", "Send a smaller one."


def send(connection: Connection, document: Document, data: bytes | bytearray = b"") -> None:
    """Send a message."""
    connection.send_bytes(json.dumps(document).encode())
    connection.send_bytes(data)


def receive(connection: Connection) -> tuple[Document, bytearray]:
    """Wait for a message; EOFError if the other side has closed the connection."""
    return json.loads(connection.recv_bytes()), bytearray(connection.recv_bytes())


def work(connection: Connection, memory: int, seconds: int) -> None:
    """Answer messages until the service closes the connection, or memory runs out.

    Args:
        connection: To the service.
        memory: Bytes that this process may have beyond what it has now.
        seconds: Limit for one message, for a process whose service has ended.
    """
    # Signals of a terminal reach all: the service still needs decoders for what it has accepted.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for output in (1, 2):  # what parsers print about a stranger's bytes is nothing for the log
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    _limit_memory(memory)
    ignore_pillow_warnings()
    decoder = BodyDecoder()
    with contextlib.suppress(EOFError, OSError):
        while True:
            document, data = receive(connection)
            if document["do"] == "forget":
                decoder.images.clear()
                continue
            signal.alarm(seconds)
            answer, view = decoder.answer(document, data)
            signal.alarm(0)
            del data
            send(connection, answer, view)
            if answer.get("ending"):
                return


def _limit_memory(more: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # where the system can hold it
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class BodyDecoder:
    """The images of the last body; `shape` is given if they are arrays of float32 already."""

    def __init__(self) -> None:
        self.images: list[tuple[str, bytes]] = []
        self.shape: tuple[int, ...] | None = None

    def answer(self, message: Document, data: bytearray) -> tuple[Document, bytes]:
        """The result that a message asks for; or a refusal, and why this process has to end."""
        what, ending = message["what"], ""
        try:
            if message["do"] == "decode":
                return self._decode(message)
            return self._read(message, data), b""
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

    def _read(self, message: Document, body: bytearray) -> Document:
        self.images = []  # of the request before: two requests never are in memory
        most, options = message["max_images"], OPTIONS.get(message["options"])
        if options is not None:
            upload = read_upload(options, message["kind"], body, most)
        elif message["options"] == TeachOptions.__name__:
            upload = read_vectors(body, message["features"])
        else:
            upload = read_inference(body, message["json_bytes"], message["size"], most)
        self.images, self.shape = upload.images, upload.shape
        options_sent = upload.options.model_dump(exclude={"images", "inputs", "vectors"})
        return {"names": [name for name, _ in self.images], "options": options_sent}

    def _decode(self, message: Document) -> tuple[Document, bytes]:
        """The fields of the response about an image, and its view."""
        name, data = self.images[message["index"]]
        self.images[message["index"]] = (name, b"")  # it is decoded once
        if self.shape is not None:
            height, width = self.shape[-2:]
            about = {"name": name, "width": width, "height": height, "view": [0, 0, width, height]}
            return {"fields": about, "shape": self.shape, "dtype": "float32"}, data
        preprocessing = Preprocessing.from_dict(message["preprocessing"])
        check_format(data, name)
        width, height = image_size(data, name=name, max_pixels=message["max_pixels"])
        view = np.ascontiguousarray(evaluation_view(data, preprocessing, name=name))
        box = [round(x, 3) for x in evaluation_box(width, height, preprocessing)]
        fields = {"name": name, "width": width, "height": height, "view": box}
        return {"fields": fields, "shape": view.shape, "dtype": "uint8"}, view.tobytes()
