"""Messages between the service and its decoders: a JSON document, and bytes that belong to it.

Not pickle: the service must not run what a decoder sends, whatever an image did to it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

Document = dict[str, Any]

_SIZES = struct.Struct("!QQ")  # bytes of the document, bytes of the data
HEAD_BYTES = _SIZES.size


def pack(document: Document, data_bytes: int = 0) -> bytes:
    """What precedes the data of a message."""
    text = json.dumps(document).encode()
    return _SIZES.pack(len(text), data_bytes) + text


def sizes(head: bytes | bytearray) -> tuple[int, int]:
    """The bytes of the document and of the data, from the first `HEAD_BYTES` of a message."""
    document, data = _SIZES.unpack(head)
    return document, data


def unpack(text: bytes | bytearray) -> Document:
    """The document of a message."""
    document: Document = json.loads(text)
    return document


def send(connection: socket.socket, document: Document, data: bytes = b"") -> None:
    """Send a message over a blocking socket."""
    connection.sendall(pack(document, len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Document, bytearray]:
    """Wait for a message on a blocking socket; EOFError if the other side has closed it."""
    document, data = sizes(_read(connection, HEAD_BYTES))
    return unpack(_read(connection, document)), _read(connection, data)


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return data
