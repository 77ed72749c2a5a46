"""A task is taught over HTTP from vectors, and nothing of it stays in the service."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.support.serving import AUTH, Opened, World, ask, task_names

import engram
from engram.serve.schemas import MAX_VECTORS
from engram.store.format import parse_engram

LABELS = ["sun", "sun", "sea", "sea"]


def coloured(i: int) -> bytes:
    """A noisy picture, yellow or blue."""
    tint = (220, 200, 40) if i < 2 else (20, 60, 200)
    pixels = np.random.default_rng(i).integers(-20, 20, (20, 24, 3)) + tint
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def vectors(client: TestClient) -> list[list[float]]:
    files = [("image", (f"{i}.png", coloured(i))) for i in range(4)]
    images = client.post("/v1/embed", files=files, data={"tasks": "base"}).json()["images"]
    return [image["vectors"]["base"] for image in images]


def body(client: TestClient, **changes: Any) -> dict[str, Any]:
    return {"task": "day", "labels": LABELS, "vectors": vectors(client), **changes}


def test_it_is_the_task_that_the_library_teaches(
    client: TestClient, world: World, small_backbone: Path
) -> None:
    response = client.post("/v1/teach", json=body(client))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/octet-stream"
    found = parse_engram(response.content, "day.safetensors")
    model = engram.MemoryViT(engram.load_backbone(small_backbone))
    images = {"sun": [coloured(0), coloured(1)], "sea": [coloured(2), coloured(3)]}
    result = engram.teach(model, "day", images)
    for name, tensor in model.engram("day").tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-4, atol=1e-4)
    assert found.metrics["val"]["images"] == result.metrics["val"]["images"] == 4
    assert str(small_backbone) not in response.content.decode("latin-1")


def test_it_can_be_attached_and_answers(client: TestClient) -> None:
    taught = client.post("/v1/teach", json=body(client, statistics="off"))
    assert "day" not in task_names(client)
    assert not parse_engram(taught.content, "day").has_sums
    assert client.put("/v1/tasks/day", content=taught.content, headers=AUTH).status_code == 201
    for i, label in enumerate(LABELS):
        (image,) = ask(client, coloured(i), tasks="day")
        assert image["tasks"]["day"]["answer"][0]["class"] == label


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": ["sun", "sun", "sun", "sun"]}, "at least 2 classes"),
        ({"labels": ["sun", "sea"]}, "one for each label"),
        ({"labels": ["sun", "sun", "sea", ""]}, "'labels.3'"),
        ({"labels": ["sun", "sun", "sea", 5]}, "'labels.3'"),
        ({"labels": ["sun"] * (MAX_VECTORS + 1)}, "labels"),
        ({"task": "../day"}, "cannot name a task"),
        ({"task": "base"}, "cannot name a task"),
        ({"vectors": [[1.0]] * 4}, "one for each label"),
        ({"vectors": "no"}, "'vectors'"),
        ({"vectors": [["a"] * 32] * 4}, "one for each label"),
        ({"vectors": [[1e30] * 32] * 4}, "no backbone gives"),
        ({"statistics": "maybe"}, "'statistics'"),
        ({"more": 1}, "'more'"),
        ({"vectors": [[0.0] * 32] * (MAX_VECTORS + 40)}, "limit"),
    ],
)
def test_what_cannot_be_taught_is_a_sentence(
    client: TestClient, changes: dict[str, Any], sentence: str
) -> None:
    response = client.post("/v1/teach", json=body(client, **changes))
    assert response.status_code == 422, response.text
    assert sentence in response.json()["error"]


@pytest.mark.parametrize("sent", [b"", b"{", b"[]", b'{"task": NaN}', b"\xff\xfe"])
def test_what_is_no_request_is_refused(client: TestClient, sent: bytes) -> None:
    assert client.post("/v1/teach", content=sent).status_code in (400, 422)


def test_values_that_are_not_finite_are_refused(client: TestClient) -> None:
    text = json.dumps(body(client, vectors=[[float("nan")] * 32] * 4))
    assert client.post("/v1/teach", content=text).status_code == 422


def test_equal_vectors_have_an_answer(client: TestClient) -> None:
    response = client.post("/v1/teach", json=body(client, vectors=[[1.0] * 32] * 4))
    assert response.status_code == 200, response.text


def test_names_of_classes_may_be_in_any_language(client: TestClient) -> None:
    labels = ["太陽", "太陽", "море <b>", "море <b>"]
    many = {"labels": labels * 60, "vectors": vectors(client) * 60}
    response = client.post("/v1/teach", json=body(client, **many))
    assert parse_engram(response.content, "day").spec.classes == ("太陽", "море <b>")


def test_whoever_may_ask_may_teach(opened: Opened) -> None:
    client = opened(ask_token="may-ask")
    assert client.post("/v1/teach", json={}).status_code == 401
    asking = {"Authorization": "Bearer may-ask"}
    assert client.post("/v1/teach", json={}, headers=asking).status_code == 422


def test_limits_hold(opened: Opened) -> None:
    client = opened(max_body=2_000)
    assert client.post("/v1/teach", content=b"0" * 3_000).status_code == 413
