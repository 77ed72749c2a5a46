"""Every engine answers as the model does, and takes new tasks while it runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from tests.support.exports import trace_once
from tests.support.regimes import known
from tests.support.serving import AUTH, Opened, picture
from tests.support.strategies import scatter
from tests.support.waiting import wait_until

import engram
from engram import EngramError
from engram.backbones.load import save_backbone
from engram.export import onnx_engine
from engram.export.runtime import RUNTIMES, make_engine
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.serve.service_settings import Settings
from engram.store.compose import compose
from engram.store.format import read_engram, serialise_engram


@pytest.mark.parametrize(("name", "value"), [("device", "cuda"), ("precision", "bf16")])
def test_an_exported_graph_has_no_device_and_no_precision_to_choose(name: str, value: str) -> None:
    model = MemoryViT(engram.random_backbone())
    with pytest.raises(EngramError, match=f"'onnx', which has no {name} {value}"):
        make_engine(model, Settings(engine="onnx", **{name: value}))


@pytest.mark.parametrize("kind", ["onnx", "onnx-int8", "openvino", "openvino-fp32"])
def test_a_task_that_changes_the_backbone_is_one_graph_with_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = RUNTIMES[kind]
    pytest.importorskip(runtime.library)
    trace_once(monkeypatch)
    backbone = engram.random_backbone(image_size=8, patch=4, width=16, depth=1, heads=2, classes=3)
    model = MemoryViT(backbone).eval()
    scatter(model.add_task("own", 3, 2, regime="memory", seed=0), by=0.3)
    pixels = torch.rand(4, 3, 8, 8)
    engine = make_engine(model, Settings(engine=kind, threads=1))
    found = engine.run(pixels, ["own", "base"])
    with torch.inference_mode():
        expected = model(pixels, ["own", "base"])
    for name, logits in expected.items():
        error = float((found[name] - logits).norm() / logits.norm())
        assert error < (0.05 if runtime.rounds else 1e-5), name
    alone = engine.run(pixels[1:2], ["own"])["own"]
    assert torch.equal(alone[0], found["own"][1]) or not runtime.rounds


@dataclass(frozen=True)
class Tiny:
    """As little as can be exported."""

    model: MemoryViT
    bundle: Path
    later: Path
    thin: Path
    token: Path  # a class token and a readout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    backbone = engram.random_backbone(image_size=8, patch=4, width=16, depth=1, heads=2, classes=3)
    backbone.preprocessing = Preprocessing((8, 8), None)
    model = MemoryViT(engram.load_backbone(save_backbone(backbone, folder / "backbone"))).eval()
    paths = []
    tasks = {
        "first": ("classification", "masked"),
        "later": ("segmentation", "masked"),
        "thin": ("classification", "side+readout"),
        "token": ("classification", "masked+adapter+readout"),
    }
    for name, (kind, regime) in tasks.items():
        settings = known(regime, cells=2, rank=4)
        task = model.add_task(name, ["one", "two"], kind=kind, regime=regime, **settings)
        torch.nn.init.normal_(task.head.weight, std=0.3)
        paths.append(model.save(name, folder / f"{name}.safetensors"))
    compose(paths[:1], folder / "bundle")
    return Tiny(model, folder / "bundle", *paths[1:])


def answers(client: TestClient, **options: Any) -> Sequence[dict[str, Any]]:
    files = [("image", (str(i), picture(i))) for i in range(3)]
    answer = client.post("/v1/predict", files=files, data=options)
    assert answer.status_code == 200, answer.text
    images: Sequence[dict[str, Any]] = answer.json()["images"]
    return images


def check(tiny: Tiny, images: Sequence[dict[str, Any]], tolerance: float, name: str) -> None:
    """What the service answers for a task is what the model answers."""
    preprocessing = tiny.model.backbone.preprocessing
    assert preprocessing is not None
    for i, image in enumerate(images):
        view = torch.from_numpy(evaluation_view(picture(i), preprocessing))
        with torch.inference_mode():
            logits = tiny.model(normalise(view[None], preprocessing), tasks=[name])[name][0]
        found = {one["class"]: one["probability"] for one in image["tasks"][name]["answer"]}
        probabilities = torch.tensor([found["one"], found["two"]])
        assert torch.allclose(probabilities, logits.softmax(-1), atol=tolerance)


def test_onnx_answers_as_the_model_does(opened: Opened, tiny: Tiny) -> None:
    opened.bundle = tiny.bundle
    client = opened(engine="onnx", threads=1)
    images = answers(client, attention="first")
    assert [list(image["tasks"]) for image in images] == [["base", "first"]] * 3
    assert images[0]["attention"]["task"] == "first"
    check(tiny, images, 1e-4, "first")
    files = {"image": ("0", picture(0))}
    (embedded,) = client.post("/v1/embed", files=files, data={"tasks": "first"}).json()["images"]
    with torch.inference_mode():  # a graph has no vectors: the model itself makes them
        logits = tiny.model.task("first").head(torch.tensor(embedded["vectors"]["first"]))
    found = {one["class"]: one["probability"] for one in images[0]["tasks"]["first"]["answer"]}
    expected = dict(zip(("one", "two"), logits.softmax(-1).tolist(), strict=True))
    assert found == pytest.approx(expected, abs=1e-4)


def test_onnx_takes_side_patches_and_readouts_while_it_runs(
    opened: Opened, tiny: Tiny, tmp_path: Path
) -> None:
    opened.bundle = Path(shutil.copytree(tiny.bundle, tmp_path / "with-thin"))
    client = opened(engine="onnx", threads=1)
    # The layers that a readout needs come out of the graph for a task that has a stream, too.
    for path in (tiny.token, tiny.thin):
        response = client.put(f"/v1/tasks/{path.stem}", content=path.read_bytes(), headers=AUTH)
        assert response.status_code == 201, response.text
        check(tiny, answers(client), 1e-4, path.stem)
    images = answers(client, attention="thin")
    assert images[0]["attention"]["pooled"]
    for name in ("first", "thin", "token"):
        check(tiny, images, 1e-4, name)


def no_export(*_: object, **__: object) -> None:
    raise AssertionError("a task was attached or removed, and something was exported")


@pytest.mark.parametrize("kind", ["onnx-int8", "openvino"])
def test_rounded_answers_stay_the_same_while_tasks_are_attached_replaced_and_removed(
    kind: str, opened: Opened, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(RUNTIMES[kind].library)
    opened.bundle = Path(shutil.copytree(tiny.bundle, tmp_path / "rounded"))
    client = opened(engine=kind, threads=1)
    for module, name in ((torch.onnx, "export"), (onnx_engine, "backbone_proto")):
        monkeypatch.setattr(module, name, no_export)
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/v1/tasks").json()["engine"] == kind
    before = answers(client)
    assert [list(image["tasks"]) for image in before] == [["base", "first"]] * 3
    check(tiny, before, 0.05, "first")
    alone = client.post("/v1/predict", files={"image": ("2", picture(2))}).json()["images"][0]
    assert alone == before[2]  # whatever shares its pass

    data = tiny.later.read_bytes()
    response = client.put("/v1/tasks/later", content=data, headers=AUTH)
    assert response.status_code == 201, response.text
    with_later = answers(client, attention="later")
    assert [list(image["tasks"]) for image in with_later] == [["base", "first", "later"]] * 3
    assert with_later[0]["attention"]["task"] == "later"
    check(tiny, with_later, 0.05, "first")
    assert [image["tasks"]["base"] for image in with_later] == [
        image["tasks"]["base"] for image in before
    ]

    assert client.delete("/v1/tasks/later", headers=AUTH).status_code == 204
    assert answers(client) == before

    old = read_engram(opened.bundle / "first.safetensors")
    new = replace(old, tensors={name: -tensor for name, tensor in old.tensors.items()})
    path, data = "/v1/tasks/first", serialise_engram(new)
    assert client.put(f"{path}?shadow=1", content=data, headers=AUTH).status_code == 200
    assert answers(client) == before
    wait_until(lambda: f'version="{new.content[:16]}"' in client.get("/metrics").text)
    assert client.post(f"{path}/promote", headers=AUTH).json()["content"] == new.content
    assert answers(client) != before
    assert client.post(f"{path}/rollback", headers=AUTH).json()["content"] == old.content
    assert answers(client) == before
    assert client.get("/readyz").json() == {"status": "ready"}
