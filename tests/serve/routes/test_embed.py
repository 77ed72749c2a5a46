"""Vectors over HTTP are the model's own, within the same limits as answers."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from tests.support.serving import Server, World, picture, put

from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.serve.routes.predictions import shown_vectors
from engram.serve.routes.writing import json_parts
from engram.serve.schemas import Embedding


def expected(world: World, data: bytes, *names: str) -> dict[str, torch.Tensor]:
    preprocessing = world.model.preprocessing
    view = torch.from_numpy(evaluation_view(data, preprocessing))[None]
    with torch.inference_mode():
        found = world.model.embed(normalise(view, preprocessing), list(names))
    return {name: rows[0] for name, rows in found.items()}


def vectors(client: TestClient, *pictures: bytes, **options: object) -> list[dict[str, Any]]:
    files = [("image", (f"{i}.png", data)) for i, data in enumerate(pictures)]
    response = client.post("/v1/embed", files=files, data=options)
    assert response.status_code == 200, response.text
    Embedding.model_validate_json(response.content)
    return [image["vectors"] for image in response.json()["images"]]


def test_vectors_are_those_of_the_model(client: TestClient, world: World) -> None:
    assert put(client, world, "thin").status_code == 201
    pictures = [picture(seed) for seed in range(3)]
    names = ("base", "first", "second", "thin")
    for data, found in zip(pictures, vectors(client, *pictures), strict=True):
        for name, vector in expected(world, data, *names).items():
            assert torch.allclose(torch.tensor(found[name]), vector, atol=1e-5)
        assert tuple(found) == names


def test_json_and_forms_give_the_same_vectors(client: TestClient) -> None:
    data = picture()
    body = {"images": [base64.b64encode(data).decode()], "tasks": ["second", "base"]}
    response = client.post("/v1/embed", json=body)
    assert response.status_code == 200, response.text
    (image,) = response.json()["images"]
    assert [image["vectors"]] == vectors(client, data, tasks="second,base")
    assert (image["width"], image["height"], image["name"]) == (24, 20, "image 1")


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        ({"tasks": "nobody"}, 404, "no task 'nobody'"),
        ({"top_k": "3"}, 422, "'top_k'"),
        ({"attention": "first"}, 422, "'attention'"),
    ],
)
def test_what_has_no_vector_is_refused(
    client: TestClient, options: dict[str, str], status: int, sentence: str
) -> None:
    response = client.post("/v1/embed", files={"image": picture()}, data=options)
    assert response.status_code == status
    assert sentence in response.json()["error"]


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    bad = {"a": torch.tensor([0.5, 1e-9]), "b": torch.tensor([1.0, float("inf")])}
    assert b"".join(json_parts({"name": "x", **shown_vectors(bad)})) == (
        b'{"name":"x","vectors":{"a":[0.5,9.99999972e-10]},"errors":{"b":"The vector of '
        b"'b' is not finite for this image; train the task again.\"}}"
    )


def test_curl_gets_vectors(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    command = ["curl", "-sS", "-F", f"image=@{tmp_path / 'a.png'}", f"{server.url}/v1/embed"]
    answer = subprocess.run(command, capture_output=True, check=True).stdout
    (image,) = Embedding.model_validate_json(answer).images
    assert list(image.vectors) == ["base", "first", "second"]
