"""Answers over HTTP are the model's own, however the request is made."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.support.serving import Opened, World, ask, picture


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
    assert "no task 'nobody'; there are base, first, second" in response.json()["error"]


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
    assert batcher.pending == 0
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
