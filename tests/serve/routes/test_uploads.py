"""Whatever is sent, the answer is a 4xx with a sentence, and the service goes on."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import signal
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from tests.support.serving import Launch, Opened, Server, World, picture

from benchmarks.serve.malformed import Malformed, good_picture, malformed
from engram.serve.app import create_app
from engram.serve.catalogue import Catalogue
from engram.serve.service_settings import Settings

# Two of every kind, but those that wait and are the same each time only once.
CASES = list({case.pieces: case for case in malformed(70, seed=1)}.values())


@pytest.fixture(scope="module")
def lasting(world: World, launch: Launch) -> Iterator[Server]:
    server = launch(world.bundle, "--timeout", "2.5")
    yield server
    server.stop(signal.SIGKILL)


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c.name}" for i, c in enumerate(CASES)])
def test_it_is_a_4xx_with_a_sentence(lasting: Server, case: Malformed) -> None:
    answered = case.send(lasting.url)
    assert 400 <= answered.status < 500, answered
    assert b"Traceback" not in answered.body
    if not case.plain:
        assert len(answered.sentence) > 20, answered
        assert answered.sentence.endswith("."), answered
        assert "/work" not in answered.sentence
        assert "\n" not in answered.sentence
    files = {"image": good_picture()}
    assert httpx.post(f"{lasting.url}/v1/predict", files=files, timeout=60).status_code == 200


def test_every_kind_is_there() -> None:
    assert len({case.name for case in CASES}) == 35


# Limits


def refusal(client: TestClient, status: int, **options: object) -> str:
    response = client.post("/v1/predict", **options)
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_a_body_is_counted_while_it_is_read(opened: Opened) -> None:
    client = opened(max_body=5000)
    assert "more than 5,000 bytes" in refusal(client, 413, files={"image": b"x" * 6000})

    def unending() -> Iterator[bytes]:  # no length is declared
        for _ in range(100):
            yield b"x" * 1000

    headers = {"Content-Type": "application/json"}
    assert "more than 5,000 bytes" in refusal(client, 413, content=unending(), headers=headers)
    assert client.post("/v1/predict", files={"image": picture()}).status_code == 200


def test_all_bodies_in_progress_are_counted(world: World) -> None:
    """One that is sent in part and then kept waiting is memory, too."""
    body = json.dumps({"images": [base64.b64encode(picture()).decode()]}).encode()
    settings = Settings(max_body=len(body), max_bodies=2 * len(body) - 2)
    app = create_app(Catalogue.load(world.bundle, settings))

    async def talk() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:-1]
            begun.set()
            await go_on.wait()
            yield body[-1:]

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def post(content: bytes | AsyncIterator[bytes]) -> httpx.Response:
                headers = {"Content-Type": "application/json"}
                return await client.post("/v1/predict", content=content, headers=headers)

            first = asyncio.create_task(post(slowly()))
            await begun.wait()
            refused = await post(body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert f"have more than {settings.max_bodies:,} bytes" in refused.json()["error"]
            go_on.set()
            assert (await first).status_code == 200
            for _ in range(3):  # all are given back
                assert (await post(body)).status_code == 200

    async def run() -> None:
        async with app.router.lifespan_context(app):
            await talk()

    asyncio.run(run())


def test_pixels_are_counted_before_they_are_decoded(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = opened(max_pixels=100)

    def never(*arguments: object) -> None:
        raise AssertionError("decoded")

    data = picture(width=20, height=20)
    monkeypatch.setattr(Image.Image, "load", never)
    sentence = refusal(client, 422, files={"image": ("big.png", data)})
    assert "20x20 pixels" in sentence
    assert "100" in sentence


def test_images_of_a_request_are_counted(opened: Opened) -> None:
    client = opened(max_images=2)
    files = [("image", (f"{i}.png", picture(i))) for i in range(3)]
    assert "may have 2 images" in refusal(client, 422, files=files)
    coded = [base64.b64encode(picture(i)).decode() for i in range(3)]
    assert "may have 2 images" in refusal(client, 422, json={"images": coded})


def test_a_number_of_many_digits_is_refused(client: TestClient) -> None:
    sentence = refusal(client, 422, files={"image": picture()}, data={"top_k": "9" * 5000})
    assert sentence.startswith("The form is invalid at 'top_k'")
    assert len(sentence) < 250


def test_a_name_that_tries_something_stays_text(client: TestClient) -> None:
    name = "../../<script>\n\x1b[31m" + "x" * 500
    sentence = refusal(client, 422, files={"image": (name, b"nonsense")})
    assert "\x1b" not in sentence
    assert len(sentence) < 250


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_every_usual_format_is_read(client: TestClient, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(file, kind)
    assert client.post("/v1/predict", files={"image": file.getvalue()}).status_code == 200
