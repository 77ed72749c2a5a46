"""Answers over HTTP are the model's own, however the question is put."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from engram.inference.attention import attention
from engram.serve.batching import Batcher
from engram.serve.catalogue import Catalogue
from engram.serve.problems import Problem
from engram.serve.schemas import NoAnswer, TaskAnswer
from engram.serve.settings import Settings
from engram.store.engram import Engram

from .conftest import AUTH, Opened, World, picture


def ask(client: TestClient, *pictures: bytes, **options: object) -> list[dict]:
    files = [("image", (f"{i}.png", data)) for i, data in enumerate(pictures)]
    response = client.post("/v1/predict", files=files, data=options)
    assert response.status_code == 200, response.text
    return response.json()["images"]


def probabilities(answer: dict, names: Sequence[str]) -> torch.Tensor:
    said = {one["class"]: one["probability"] for one in answer["answer"]}
    assert len(said) == len(names)
    return torch.tensor([said[name] for name in names])


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


def test_every_kind_of_task_answers_in_its_way(client: TestClient, world: World) -> None:
    kinds = ("multilabel", "regression", "segmentation")
    for kind in kinds:
        data = world.engrams[kind].read_bytes()
        response = client.put(f"/v1/tasks/{kind}", content=data, headers=AUTH)
        assert response.status_code == 201, response.text
        assert response.json()["kind"] == kind
    (image,) = ask(client, picture(), tasks=",".join(kinds), looks="segmentation")
    outputs = world.logits(picture(), *kinds)
    for kind in kinds:
        said = image["tasks"][kind]
        TaskAnswer.model_validate(said)
        assert said["kind"] == kind
    values = {one["name"]: one["value"] for one in image["tasks"]["regression"]["answer"]}
    assert list(values.values()) == pytest.approx(outputs["regression"].tolist(), rel=1e-4)
    labels = {one["class"]: one["probability"] for one in image["tasks"]["multilabel"]["answer"]}
    sigmoids = outputs["multilabel"].sigmoid().tolist()
    assert [labels[name] for name in ("one", "two", "three")] == pytest.approx(sigmoids, abs=1e-5)
    areas = image["tasks"]["segmentation"]["answer"]
    mask = Image.open(io.BytesIO(base64.b64decode(areas["mask"].partition(",")[2])))
    assert areas["size"] == [mask.height, mask.width] == [16, 16]
    classes = outputs["segmentation"].argmax(0)
    assert (torch.from_numpy(np.array(mask)) == classes).float().mean() > 0.99
    colours = np.array(mask.convert("RGB")).reshape(-1, 3)
    assert {one["colour"] for one in areas["classes"] if one["share"]} == {
        "#" + bytes(colour).hex() for colour in colours
    }


def test_a_task_that_is_not_finite_silences_no_other(client: TestClient, world: World) -> None:
    data = world.engrams["wild"].read_bytes()
    assert client.put("/v1/tasks/wild", content=data, headers=AUTH).status_code == 201
    (image,) = ask(client, picture())
    assert image["tasks"].keys() == {"base", "first", "second", "wild"}
    wild = image["tasks"].pop("wild")
    NoAnswer.model_validate(wild)
    assert wild["error"].startswith("'wild' has numbers that are not finite for this image")
    assert all(said["answer"] for said in image["tasks"].values())


def test_where_a_task_looked(client: TestClient, world: World) -> None:
    data = picture(3, width=40, height=20)
    (image,) = ask(client, data, looks="second")
    preprocessing = world.model.trunk.preprocessing
    assert preprocessing is not None
    assert (image["width"], image["height"], image["view"]) == (40, 20, [0, 0, 40, 20])
    from engram.images.preprocessing import normalise
    from engram.images.views import evaluation_view

    view = torch.from_numpy(evaluation_view(data, preprocessing))
    seen = attention(world.model, "second", normalise(view[None], preprocessing))
    patches = torch.tensor([layer["patches"] for layer in image["looks"]["layers"]])
    assert torch.allclose(patches, seen.patches[0], atol=1e-5)
    shares = torch.tensor([layer["shares"] for layer in image["looks"]["layers"]])
    assert torch.allclose(shares, seen.shares, atol=1e-4)
    assert len(image["looks"]["parts"]) == shares.shape[1]
    assert "looks" in ask(client, data, looks="base")[0]


def test_a_turned_photograph_has_its_upright_size(client: TestClient) -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 10)).save(file, "JPEG", exif=exif)
    (image,) = ask(client, file.getvalue())
    assert (image["width"], image["height"]) == (10, 30)


def test_tasks_are_told(client: TestClient) -> None:
    response = client.get("/v1/tasks")
    told = response.json()
    assert [task["name"] for task in told["tasks"]] == ["first", "second"]
    assert told["tasks"][1]["extends"] == ["first"]
    assert told["trunk"]["classes"] == 7
    assert told["attaching"]
    again = client.get("/v1/tasks", headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304
    detail = client.get("/v1/tasks/second").json()
    assert detail["class_names"] == [f"second <b>{i}</b>" for i in range(3)]
    assert detail["metrics"] == {"accuracy": 0.5}
    assert client.get("/v1/tasks/nobody").status_code == 404


def test_telling_tasks_hashes_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep all other requests waiting."""

    def never(self: Engram) -> str:
        raise AssertionError("hashed")

    monkeypatch.setattr(Engram, "content", property(never))
    told = client.get("/v1/tasks").json()["tasks"]
    assert client.get("/v1/tasks/second").json()["content"] == told[1]["content"]


def test_health_readiness_and_numbers(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    ask(client, picture(), picture(1), tasks="first")
    client.get("/no/such/path")
    text = client.get("/metrics").text
    assert 'engram_requests_total{method="POST",path="/v1/predict",status="200"} 1.0' in text
    assert 'engram_requests_total{method="GET",path="other",status="404"} 1.0' in text
    assert 'engram_answers_total{task="first"} 2.0' in text
    assert "engram_waiting_images 0.0" in text
    assert "engram_tasks 2.0" in text


def test_the_reference_needs_no_network(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/predict" in page.text
    assert "http" not in page.text.replace("HTTP", "")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/openapi.json").json()["paths"].keys() >= {"/v1/predict", "/v1/tasks"}


# Batching


def test_a_pass_has_images_of_many_requests(bundle, world: World) -> None:
    settings = Settings(batch=4, wait_ms=1000)
    snapshot = Catalogue(bundle, settings).now
    sizes: list[int] = []

    async def run() -> list[dict[str, torch.Tensor]]:
        batcher = Batcher(settings, sizes.append)
        batcher.start()
        views = [torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8) for _ in range(6)]
        names = [["first"], ["second", "base"], ["first"], ["base"], ["second"], ["first"]]
        settings_wait = [
            batcher.answer(snapshot, [view], tasks)
            for view, tasks in zip(views, names, strict=True)
        ]
        said = await asyncio.gather(*settings_wait)
        await batcher.stop()
        assert [list(one[0]) for one in said] == names
        return [one[0] for one in said]

    asyncio.run(run())
    assert sizes == [4, 2]


def test_past_the_bound_come_back_later(bundle) -> None:
    async def run() -> None:
        batcher = Batcher(Settings(queue=3, max_images=3))
        with batcher.room(2), pytest.raises(Problem) as refused:
            batcher.check_room(2)
        assert refused.value.status == 503
        assert refused.value.headers == {"Retry-After": "1"}
        batcher.check_room(3)

    asyncio.run(run())


def test_a_request_that_takes_too_long_is_told_to_come_back(opened: Opened) -> None:
    client = opened(timeout=0.2)
    app = client.app
    slow = app.state.batcher  # type: ignore[attr-defined]
    slow._loop.cancel()  # an engine that never answers
    response = client.post("/v1/predict", files={"image": picture()})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert slow.images == 0
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
