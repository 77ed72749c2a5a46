"""Answers over HTTP are the model's own, however the request is made."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Sequence

import httpx
import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.support.serving import Opened, Server, World, ask, flat_png, many_scans, picture


def probabilities(answer: dict, names: Sequence[str]) -> torch.Tensor:
    found = {one["class"]: one["probability"] for one in answer["answer"]}
    assert len(found) == len(names)
    return torch.tensor([found[name] for name in names])


def test_answers_are_those_of_the_model(client: TestClient, world: World) -> None:
    pictures = [picture(seed) for seed in range(5)]
    for data, image in zip(pictures, ask(client, *pictures, top_k=1000), strict=True):
        expected = world.logits(data, "base", "first", "second")
        assert image["tasks"].keys() == expected.keys()
        for name, logits in expected.items():
            answer = image["tasks"][name]
            assert answer["kind"] == "classification"
            classes = [str(i) for i in range(7)]
            if name != "base":
                classes = list(world.model.task(name).spec.classes)
            assert torch.allclose(probabilities(answer, classes), logits.softmax(-1), atol=2e-6)
            values = [one["probability"] for one in answer["answer"]]
            assert values == sorted(values, reverse=True)


def test_json_and_forms_say_the_same(client: TestClient) -> None:
    data = picture()
    body = {"images": [base64.b64encode(data).decode()], "tasks": ["second"], "top_k": 2}
    response = client.post("/v1/predict", json=body)
    assert response.status_code == 200, response.text
    (image,) = response.json()["images"]
    (other,) = ask(client, data, tasks="second", top_k=2)
    assert image["tasks"] == other["tasks"]
    assert [one["class"][:6] for one in image["tasks"]["second"]["answer"]] == ["second"] * 2


def test_only_the_tasks_that_were_asked_answer(client: TestClient) -> None:
    assert list(ask(client, picture(), tasks="second,base")[0]["tasks"]) == ["second", "base"]
    assert list(ask(client, picture(), tasks=["first", "first"])[0]["tasks"]) == ["first"]
    response = client.post("/v1/predict", files={"image": picture()}, data={"tasks": "nobody"})
    assert response.status_code == 404
    assert "no task 'nobody'" in response.json()["error"]


def test_a_turned_photograph_has_its_upright_size(client: TestClient) -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 10)).save(file, "JPEG", exif=exif)
    (image,) = ask(client, file.getvalue())
    assert (image["width"], image["height"]) == (10, 30)


def test_a_request_that_takes_too_long_may_try_again_later(opened: Opened) -> None:
    client = opened(timeout=0.2)
    batcher = client.app.state.batcher  # type: ignore[attr-defined]
    assert client.portal is not None
    client.portal.call(batcher.stop)  # from now on no image is answered
    response = client.post("/v1/predict", files={"image": picture()})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert batcher.places.total == 0
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200


def test_health_is_answered_while_a_hostile_body_is_read(server: Server) -> None:
    body = b'{"images":[1%s]}' % (b",1" * 1_000_000)
    headers = {"Content-Type": "application/json"}
    answered: list[int] = []

    def send() -> None:
        url = f"{server.url}/v1/predict"
        answered.append(httpx.post(url, content=body, headers=headers, timeout=60).status_code)

    thread, waits = threading.Thread(target=send), list[float]()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        thread.start()
        while thread.is_alive() or not waits:
            began = time.perf_counter()
            assert client.get("/healthz").status_code == 200
            waits.append(time.perf_counter() - began)
    thread.join()
    assert answered == [422]
    # It was seven seconds on a quiet machine when the body was read where requests are.
    assert max(waits) < 5


def test_pictures_that_take_minutes_are_refused_and_others_go_on(client: TestClient) -> None:
    for data in (many_scans(4000), b"P6 # " + b"x" * 10**6 + b"\n1 1 255 abc"):
        response = client.post("/v1/predict", files={"image": ("a.jpg", data)})
        assert response.status_code == 422, response.text
        assert "a.jpg: " in response.json()["error"]
    ask(client, picture())


def test_a_picture_beyond_the_time_to_decode_it_is_refused(opened: Opened) -> None:
    client = opened(decode_timeout=0.1, decoders=1)
    response = client.post("/v1/predict", files={"image": ("big.png", flat_png(7000))})
    assert response.status_code == 422, response.text
    assert "big.png: it takes more than 0.1 seconds" in response.json()["error"]
    assert "engram_killed_decoders_total 1.0" in client.get("/metrics").text
