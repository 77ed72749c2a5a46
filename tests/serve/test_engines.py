"""Every engine answers as the model does, and takes new tasks while it runs."""

from __future__ import annotations

import pytest
import torch

from engram.errors import EngramError
from engram.serve.settings import Settings

from .conftest import AUTH, Opened, World, picture


@pytest.mark.parametrize(("engine", "tolerance"), [("onnx", 1e-4)])
def test_onnx_answers_as_the_model_does(
    opened: Opened, world: World, engine: str, tolerance: float
) -> None:
    client = opened(engine=engine, threads=1)
    data = world.engrams["segmentation"].read_bytes()
    response = client.put("/v1/tasks/segmentation", content=data, headers=AUTH)
    assert response.status_code == 201, response.text
    options = {"top_k": 100, "looks": "second"}
    files = [("image", (str(i), picture(i))) for i in range(3)]
    answer = client.post("/v1/predict", files=files, data=options)
    assert answer.status_code == 200, answer.text
    for i, image in enumerate(answer.json()["images"]):
        assert list(image["tasks"]) == ["base", "first", "second", "segmentation"]
        assert image["looks"]["task"] == "second"
        for name, logits in world.logits(picture(i), "first", "second").items():
            said = {one["class"]: one["probability"] for one in image["tasks"][name]["answer"]}
            told = torch.tensor([said[one] for one in world.model.task(name).spec.classes])
            assert torch.allclose(told, logits.softmax(-1), atol=tolerance)
    assert client.delete("/v1/tasks/segmentation", headers=AUTH).status_code == 204


def test_there_are_no_other_engines() -> None:
    with pytest.raises(EngramError, match="engine is 'fast'; it can be torch, onnx, onnx-int8"):
        Settings(engine="fast")
