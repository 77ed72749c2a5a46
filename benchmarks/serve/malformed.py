"""Invalid requests of many kinds: each should get a 4xx status and a sentence that explains it."""

from __future__ import annotations

import base64
import io
import json
import random
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from PIL import Image

BOUNDARY = b"----boundary"
JSON = "application/json"


@dataclass(frozen=True)
class Answered:
    """The response; status 0 if the connection was closed without one."""

    status: int
    body: bytes

    @property
    def sentence(self) -> str:
        try:
            return str(json.loads(self.body)["error"])
        except (ValueError, KeyError, TypeError):
            return ""


@dataclass(frozen=True)
class Malformed:
    """`pieces` are sent with a pause between them; `plain`: may be refused without a JSON body."""

    name: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    plain: bool = False

    def send(self, url: str, timeout: float = 60) -> Answered:
        """Send the bytes as they are and read the response."""
        parts = urlsplit(url)
        address = (str(parts.hostname), parts.port or 80)
        with socket.create_connection(address, timeout) as connection:
            try:
                for i, piece in enumerate(self.pieces):
                    if i:
                        time.sleep(self.pause)
                    connection.sendall(piece)
            except OSError:  # refused before everything was sent: the response is there
                pass
            return _read(connection)


def _read(connection: socket.socket) -> Answered:
    data = b""
    try:
        while True:
            piece = connection.recv(65536)
            data += piece
            head, found, body = data.partition(b"\r\n\r\n")
            length = [
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ]
            if not piece or (found and length and len(body) >= length[0]):
                break
    except OSError:
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    return Answered(int(words[1]) if len(words) > 1 and words[1].isdigit() else 0, body)


# Building them


def request(
    method: str, path: str, body: bytes = b"", kind: str = "", headers: str = "", length: str = ""
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    if kind:
        lines.append(f"Content-Type: {kind}")
    if length != " ":
        lines.append(f"Content-Length: {length or len(body)}")
    return ("\r\n".join(lines) + "\r\n" + headers + "\r\n").encode("latin-1") + body


def form(*parts: tuple[str, bytes, bool], closed: bool = True) -> bytes:
    """Multipart of (field, value, whether it is a file)."""
    out = b""
    for field, value, is_file in parts:
        name = f'; filename="{field}.png"' if is_file else ""
        out += b"--" + BOUNDARY + b"\r\nContent-Disposition: form-data; "
        out += f'name="{field}"{name}'.encode() + b"\r\n\r\n" + value + b"\r\n"
    return out + (b"--" + BOUNDARY + b"--\r\n" if closed else b"")


def predict(*parts: tuple[str, bytes, bool], closed: bool = True) -> bytes:
    kind = f"multipart/form-data; boundary={BOUNDARY.decode()}"
    return request("POST", "/v1/predict", form(*parts, closed=closed), kind)


def good_picture(seed: int = 0) -> bytes:
    rng = random.Random(seed)
    file = io.BytesIO()
    Image.frombytes("RGB", (16, 16), rng.randbytes(768)).save(file, "PNG")
    return file.getvalue()


def bomb(side: int = 60_000) -> bytes:
    """A small PNG whose header declares `side` × `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(100_000)))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


PATHS = ("..%2f..%2fetc%2fpasswd", "%2e%2e", ".env", "a%00b", "A", "x" * 300, "%ff", "a%20b")
BODIES = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"NaN",
    b"1e999",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"a":1}',
)
OPTIONS = (
    b'"top_k": NaN', b'"top_k": Infinity', b'"top_k": 0', b'"top_k": -1', b'"top_k": "5"',
    b'"top_k": 1.5', b'"top_k": true', b'"top_k": 99999999999999999999', b'"tasks": []',
    b'"tasks": "first"', b'"tasks": [1]', b'"tasks": ["../../etc"]', b'"tasks": ["\\u0000"]',
    b'"attention": 1', b'"attention": "nobody"', b'"more": 1',
)  # fmt: skip
CODES = (b"####", b"a", b"====", b"data:image/png;base64,", b"\\ud800", b"aGVsbG8")
TYPES = ("", "image/png", "text/plain", "a/b;;=;")
BINARY = "application/octet-stream"


def _requests(rng: random.Random) -> dict[str, bytes]:
    """One request of every kind that the service itself refuses with a sentence."""
    picture = good_picture(rng.randrange(1000))
    given, coded = ("image", picture, True), base64.b64encode(picture)
    spoiled = bytearray(picture[:-30])
    for _ in range(40):
        spoiled[rng.randrange(8, 60)] = rng.randrange(256)
    number = rng.choice([b"NaN", b"-1", b"1.5", b""])
    post = partial(request, "POST", "/v1/predict")
    return {
        "not an image": predict(("image", rng.randbytes(500), True)),
        "empty image": predict(("image", b"", True)),
        "truncated image": predict(("image", picture[: rng.randrange(9, len(picture) - 20)], True)),
        "spoiled image": predict(("image", bytes(spoiled), True)),
        "bomb": predict(("image", bomb(rng.randrange(20_000, 60_000)), True)),
        "svg": predict(("image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", True)),
        "no image": predict(("top_k", b"1", False)),
        "image as text": predict(("image", b"hello", False)),
        "too many images": predict(*[given] * 40),
        "unknown field": predict(given, ("more", b"1", False)),
        "option as file": predict(given, ("tasks", b"first", True)),
        "top_k is no number": predict(given, ("top_k", number, False)),
        "unknown task": predict(given, ("tasks", b"../../etc/passwd", False)),
        "form not closed": predict(given, closed=False),
        "form without boundary": post(form(given), "multipart/form-data"),
        "form that is none": post(rng.randbytes(300), "multipart/form-data; boundary=x"),
        "wrong type": post(picture, rng.choice(TYPES)),
        "wrong JSON": post(rng.choice(BODIES), JSON),
        "wrong option": post(b'{"images": ["%s"], %s}' % (coded, rng.choice(OPTIONS)), JSON),
        "bad base64": post(b'{"images": ["%s"]}' % rng.choice(CODES), JSON),
        "JSON of no images": post(b'{"images": []}', JSON),
        "declared too large": post(b"{}", JSON, length="99999999999"),
        "path-like task": request("GET", f"/v1/tasks/{rng.choice(PATHS)}"),
        "path-like attach": request("PUT", f"/v1/tasks/{rng.choice(PATHS)}", b"x", BINARY),
        "attach without token": request("PUT", "/v1/tasks/x", b"x", BINARY),
        "delete with a wrong token": request(
            "DELETE", "/v1/tasks/first", headers="Authorization: Bearer nonsense\r\n"
        ),
        "wrong method": request(rng.choice(["PATCH", "TRACE", "BREW"]), "/v1/predict"),
        "no such path": request("GET", rng.choice(["/v3", "/../etc/passwd", "/%00"])),
    }


def _protocol_errors(rng: random.Random) -> dict[str, bytes]:
    """One of every kind that the HTTP server may refuse before the service sees a request."""
    many = "".join(f"X-{i}: {i}\r\n" for i in range(9000))
    chunked = "Transfer-Encoding: chunked\r\n"
    return {
        "huge header": request("GET", "/healthz", headers=f"X-Much: {'x' * 100_000}\r\n"),
        "many headers": request("GET", "/healthz", headers=many),
        "no HTTP": rng.randbytes(200) + b"\r\n\r\n",
        "two lengths": request("POST", "/v1/predict", b"{}", headers="Content-Length: 7\r\n"),
        "length that is no number": request("POST", "/v1/predict", b"{}", length="many"),
        "bad chunk": request("POST", "/v1/predict", b"zz\r\n{}\r\n", JSON, chunked, length=" "),
    }


def malformed(count: int, seed: int = 0) -> Iterator[Malformed]:
    """`count` requests, the kinds in turn.

    The slow body pauses for three seconds, so the service must have a shorter timeout.
    """
    rng = random.Random(seed)
    for i in range(count):
        plain, whole = _protocol_errors(rng), predict(("image", good_picture(), True))
        cases = [
            *(Malformed(name, (data,)) for name, data in _requests(rng).items()),
            *(Malformed(name, (data,), plain=True) for name, data in plain.items()),
            Malformed("slow body", (whole[:-40], whole[-40:-20]), pause=3.0),
        ]
        yield cases[i % len(cases)]
