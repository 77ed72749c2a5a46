"""What a decoder does: it reads one body, and decodes the images in it one after the other.

Runs in a process of its own, see `launcher.py`. It answers every message with one, except `forget`.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path

import numpy as np

from engram.images.decode import BadImage, LargeImage, image_size
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_box, evaluation_view
from engram.serve.decoding.formats import check_format
from engram.serve.decoding.infer import read_inference
from engram.serve.decoding.messages import Document, receive, send
from engram.serve.decoding.upload import Limits, Refusal, read_upload
from engram.serve.routes.schemas import OPTIONS
from engram.util.quiet import ignore_pillow_warnings
from engram.util.text import printable

Answer = tuple[Document, bytes]


def work(connection: socket.socket, memory: int) -> None:
    """Answer messages until the service closes the connection, or memory runs out."""
    _limit_memory(memory)
    ignore_pillow_warnings()
    worker = Worker()
    with contextlib.suppress(EOFError, OSError):
        while True:
            document, data = receive(connection)
            if document["do"] == "forget":
                worker.images.clear()
                continue
            answer, view = worker.answer(document, data)
            del data
            send(connection, answer, view)
            if "out_of_memory" in answer or "failed" in answer:
                return


def _limit_memory(more: int) -> None:
    """Let this process have so many bytes more than it has now, where the system can hold it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class Worker:
    """The images of the last body that was read; `size` is given if they are pixels already."""

    def __init__(self) -> None:
        self.images: list[tuple[str, bytes]] = []
        self.size: list[int] | None = None

    def answer(self, message: Document, data: bytearray) -> Answer:
        """The result of what a message asks for, or what is wrong."""
        try:
            if message["do"] == "decode":
                return self._decode(message)
            return self._read(message, data), b""
        except Refusal as refusal:
            return {"refused": refusal.sentence, "status": refusal.status}, b""
        except BadImage as error:
            if isinstance(error.__cause__, MemoryError):
                return {"out_of_memory": True}, b""
            return {"bad_image": str(error), "large": isinstance(error, LargeImage)}, b""
        except MemoryError:
            return {"out_of_memory": True}, b""
        except BaseException as error:  # of a parser in Rust that panics, too
            return {"failed": printable(f"{type(error).__name__}: {error}", 200)}, b""

    def _read(self, message: Document, body: bytearray) -> Document:
        self.images = []  # of the request before: two requests never are in memory
        limits, self.size = Limits(**message["limits"]), None
        if message["do"] == "read":
            upload = read_upload(OPTIONS[message["options"]], message["kind"], body, limits)
            self.images = upload.images
            options = upload.options.model_dump(exclude={"images"})
        else:
            asked = read_inference(body, message["json_bytes"], message["size"], limits)
            self.images, self.size = asked.images, message["size"] if asked.pixels else None
            options = asked.options.model_dump()
        return {"names": [name for name, _ in self.images], "options": options}

    def _decode(self, message: Document) -> Answer:
        """The fields of the response about an image, and its view."""
        name, data = self.images[message["index"]]
        self.images[message["index"]] = (name, b"")  # it is decoded once
        if self.size is not None:
            height, width = self.size
            about = {"name": name, "width": width, "height": height, "view": [0, 0, width, height]}
            return {"fields": about, "shape": (3, height, width), "dtype": "float32"}, data
        preprocessing = Preprocessing.from_dict(message["preprocessing"])
        check_format(data, name)
        width, height = image_size(data, name=name, max_pixels=message["max_pixels"])
        view = np.ascontiguousarray(evaluation_view(data, preprocessing, name=name))
        box = [round(x, 3) for x in evaluation_box(width, height, preprocessing)]
        fields = {"name": name, "width": width, "height": height, "view": box}
        return {"fields": fields, "shape": view.shape, "dtype": "uint8"}, view.tobytes()
