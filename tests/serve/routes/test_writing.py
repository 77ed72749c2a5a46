"""Answers are sent in pieces, and none is written for a client that is gone."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from tests.support.serving import Launch, Server, World
from tests.support.waiting import wait_until

from benchmarks.serve.malformed import request
from engram.serve.problems import Problem
from engram.serve.routes.writing import PIECE_BYTES, PIECE_VALUES, Answer, numbers, raw
from engram.store.compose import compose

Work = Callable[[Answer], Awaitable[None]]


def sent(work: Work, receive: Callable[[], Awaitable[dict[str, Any]]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(dict(message))

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(Answer(work, threads)({"type": "http"}, receive, send))  # type: ignore[arg-type]
    return messages


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def test_a_small_answer_is_sent_whole_and_a_large_one_in_pieces() -> None:
    async def small(answer: Answer) -> None:
        await answer.write([b"a", b"b"], {})

    start, body = sent(small, stays)
    assert dict(start["headers"])[b"content-length"] == b"2"
    assert (body["body"], body["more_body"]) == (b"ab", False)

    async def large(answer: Answer) -> None:
        await answer.write([b"x" * PIECE_BYTES] * 3 + [b"y"], {})

    start, *bodies = sent(large, stays)
    assert b"content-length" not in dict(start["headers"])
    assert [len(one["body"]) for one in bodies] == [PIECE_BYTES] * 3 + [1]
    assert [one["more_body"] for one in bodies] == [True] * 3 + [False]


def test_nothing_is_written_for_a_client_that_is_gone() -> None:
    written = 0

    def unending() -> Iterator[bytes]:
        nonlocal written
        while True:
            written += 1
            yield b"x" * PIECE_BYTES

    async def leaves() -> dict[str, Any]:
        while written < 5:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def work(answer: Answer) -> None:
        await answer.write(unending(), {})

    assert not any(not one.get("more_body", True) for one in sent(work, leaves))
    assert written < 20


def test_an_answer_that_takes_too_long_is_seen_to_be_incomplete() -> None:
    async def work(answer: Answer) -> None:
        await answer.write([b"x" * PIECE_BYTES] * 2, {})
        raise Problem(503, "Too late.")

    assert sent(work, stays)[0]["status"] == 200  # no second status

    async def early(answer: Answer) -> None:
        raise Problem(503, "Too late.")

    with pytest.raises(Problem):
        sent(early, stays)


def test_values_are_written_with_all_their_digits() -> None:
    values = torch.randn(2, PIECE_VALUES + 3)
    text = b"[" + b",".join(numbers(values)) + b"]"
    assert torch.equal(torch.tensor(json.loads(text)).view_as(values), values)
    assert b"".join(raw(values)) == values.numpy().tobytes()
    mask = torch.randint(0, 255, (2, 9, 9), dtype=torch.uint8)
    assert json.loads(b"[" + b",".join(numbers(mask)) + b"]") == mask.flatten().tolist()
    assert b"".join(raw(mask)) == mask.numpy().tobytes()


def test_the_service_stops_writing_when_a_client_leaves(
    world: World, launch: Launch, tmp_path: Path
) -> None:
    """A client that reads nothing of a long answer, and then leaves, gives its places back."""
    compose([world.engrams["segmentation"]], tmp_path / "bundle")
    server = launch(tmp_path / "bundle", *(f"--{n}=1024" for n in ("max-images", "queue", "batch")))
    pixels = bytes(4 * 1024 * 3 * 16 * 16)
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [1024, 3, 16, 16]}
    document = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": len(pixels)}}],
        "outputs": [{"name": "segmentation:logits"}],
    }
    head = json.dumps(document).encode()
    length = f"Inference-Header-Content-Length: {len(head)}\r\n"
    path, kind = "/v2/models/segmentation/infer", "application/json"
    address = urlsplit(server.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it is connected
        client.connect((str(address.hostname), address.port))
        client.sendall(request("POST", path, head + pixels, kind, length))
        assert client.recv(12) == b"HTTP/1.1 200"
        assert queued(server) == 1024  # nobody reads what would be ten megabytes
    wait_until(lambda: queued(server) == 0)
    assert server.stop() == 0
    assert "Traceback" not in server.running.stderr


def queued(server: Server) -> float:
    """Images that are accepted and not answered."""
    lines = server.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("engram_waiting_images ")]
    return float(line.split()[1])
