"""Every kind of task answers in its own form, and attention maps are the model's."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.support.engrams import familiar
from tests.support.serving import AUTH, World, ask, picture, put

import engram
from engram import MemoryViT
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.serve.schemas import NoAnswer, TaskAnswer


def test_every_kind_of_task_answers_in_its_way(client: TestClient, world: World) -> None:
    kinds = ("multilabel", "regression", "segmentation")
    for kind in kinds:
        data = world.engrams[kind].read_bytes()
        response = client.put(f"/v1/tasks/{kind}", content=data, headers=AUTH)
        assert response.status_code == 201, response.text
        assert response.json()["kind"] == kind
    (image,) = ask(client, picture(), tasks=",".join(kinds), attention="segmentation")
    outputs = world.logits(picture(), *kinds)
    for kind in kinds:
        answer = image["tasks"][kind]
        TaskAnswer.model_validate(answer)
        assert answer["kind"] == kind
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


def test_an_anomaly_has_a_score_and_a_heat_map(client: TestClient, world: World) -> None:
    data = world.engrams["anomaly"].read_bytes()
    assert client.put("/v1/tasks/anomaly", content=data, headers=AUTH).status_code == 201
    (image,) = ask(client, picture(), tasks="anomaly", attention="anomaly")
    TaskAnswer.model_validate(image["tasks"]["anomaly"])
    answer, output = image["tasks"]["anomaly"]["answer"], world.logits(picture(), "anomaly")
    assert answer["score"] == pytest.approx(float(output["anomaly"].max()), abs=1e-3)  # of 1 patch
    assert answer["anomalous"] == (answer["score"] > answer["threshold"])
    heat = Image.open(io.BytesIO(base64.b64decode(answer["map"].partition(",")[2])))
    rows, columns = answer["size"]
    assert (heat.width / columns, heat.height / rows) == (8, 8)
    row, column = divmod(int(output["anomaly"].argmax()), columns)
    values = np.array(heat)
    assert int(values[8 * row + 4, 8 * column + 4]) >= int(values.max()) - 2


def test_a_task_that_knows_its_images_gives_its_familiarity(
    client: TestClient, world: World, tmp_path: Path
) -> None:
    model = MemoryViT(world.model.backbone).eval()
    familiar(model.add_task("known", 3))
    data = model.save("known", tmp_path / "known.safetensors").read_bytes()
    assert client.put("/v1/tasks/known", content=data, headers=AUTH).status_code == 201
    one, two = ask(client, picture(1), picture(2), tasks="known,first")
    assert list(one["tasks"]) == ["known", "first"]
    assert "familiarity" not in one["tasks"]["first"]
    TaskAnswer.model_validate(one["tasks"]["known"])
    (expected,) = engram.predict(model, [Image.open(io.BytesIO(picture(2)))])
    assert two["tasks"]["known"]["familiarity"] == pytest.approx(
        expected["familiarity"]["known"], abs=1e-3
    )


def test_a_task_that_is_not_finite_silences_no_other(client: TestClient, world: World) -> None:
    data = world.engrams["wild"].read_bytes()
    assert client.put("/v1/tasks/wild", content=data, headers=AUTH).status_code == 201
    (image,) = ask(client, picture())
    assert image["tasks"].keys() == {"base", "first", "second", "wild"}
    wild = image["tasks"].pop("wild")
    NoAnswer.model_validate(wild)
    assert "'wild' is not finite" in wild["error"]
    assert all(task["answer"] for task in image["tasks"].values())


def test_attention_maps_are_those_of_the_model(client: TestClient, world: World) -> None:
    data = picture(3, width=40, height=20)
    (image,) = ask(client, data, attention="second")
    preprocessing = world.model.backbone.preprocessing
    assert preprocessing is not None
    assert (image["width"], image["height"], image["view"]) == (40, 20, [0, 0, 40, 20])
    view = torch.from_numpy(evaluation_view(data, preprocessing))
    maps = world.model.attention_maps("second", normalise(view[None], preprocessing))
    patches = torch.tensor([layer["patches"] for layer in image["attention"]["layers"]])
    assert torch.allclose(patches, maps.contribution[0], rtol=1e-3, atol=1e-5)
    shares = torch.tensor([layer["shares"] for layer in image["attention"]["layers"]])
    assert torch.allclose(shares, maps.shares, atol=1e-4)
    assert len(image["attention"]["parts"]) == shares.shape[1]
    assert "attention" in ask(client, data, attention="base")[0]
    assert not image["attention"]["pooled"]


def test_the_map_of_side_patches_is_what_they_pool(client: TestClient, world: World) -> None:
    data, preprocessing = picture(3), world.model.backbone.preprocessing
    assert preprocessing is not None
    for name in ("both", "layers"):
        assert put(client, world, name).status_code == 201
    (image,) = ask(client, data, attention="both")
    view = torch.from_numpy(evaluation_view(data, preprocessing))
    maps = world.model.attention_maps("both", normalise(view[None], preprocessing))
    (only,) = image["attention"]["layers"]
    assert image["attention"]["pooled"]
    assert torch.allclose(
        torch.tensor(only["patches"]), maps.contribution[0, 0], rtol=1e-3, atol=1e-5
    )
    assert sum(only["shares"]) == pytest.approx(1, abs=1e-4)
    maps = [ask(client, data, attention=name)[0]["attention"] for name in ("base", "layers")]
    assert maps[0]["layers"] == maps[1]["layers"]  # a readout has no attention of its own
