"""A message arrives as it was sent, in whatever pieces."""

from __future__ import annotations

import socket
import threading

import pytest

from engram.serve.decoding.messages import HEAD_BYTES, pack, receive, send, sizes, unpack


def test_a_message_arrives_whole() -> None:
    one, other = socket.socketpair()
    data = bytes(range(256)) * 4000
    with one, other:
        sender = threading.Thread(target=send, args=(one, {"do": "read", "ä": [1.5]}, data))
        sender.start()
        assert receive(other) == ({"do": "read", "ä": [1.5]}, data)
        sender.join()


def test_a_closed_connection_is_the_end() -> None:
    one, other = socket.socketpair()
    with other:
        one.sendall(pack({"do": "read"}, 10) + b"half")
        one.close()
        with pytest.raises(EOFError):
            receive(other)


def test_the_head_says_how_much_follows() -> None:
    message = pack({"a": 1}, 7)
    size, data = sizes(message[:HEAD_BYTES])
    assert data == 7
    assert unpack(message[HEAD_BYTES : HEAD_BYTES + size]) == {"a": 1}
