"""Answers about image files: the best classes, and a sentence for what cannot be read."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import refuses

from engram import EngramError, MemoryViT, random_backbone
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.predict import predict
from engram.vit.vit import HeadConfig


def test_predict_gives_the_top_classes_of_every_task(model: MemoryViT, photos: Path) -> None:
    other = model.add_task("more", 9, seed=1)
    torch.nn.init.normal_(other.head.weight)
    images = [photos / "test" / "red" / name for name in ("0.png", "empty.png", "1.png")]
    first, broken, second = predict(model, images, top_k=2, batch=1)
    assert first["image"] == str(images[0])
    assert list(first["tasks"]) == ["colours", "more"]  # the backbone's own only where asked
    assert broken == {
        "image": str(images[1]),
        "error": f"{images[1]}: the file is empty",
    }
    for answer in (first, second):
        for name, best in answer["tasks"].items():
            assert len(best) == 2
            assert best[0]["probability"] >= best[1]["probability"] > 0
            if name == "colours":
                assert {one["class"] for one in best} < {"red", "green", "blue"}
    assert predict(model, images, tasks=["more"])[0]["tasks"].keys() == {"more"}
    with pytest.raises(EngramError, match="ask for at least 1 class"):
        predict(model, images, top_k=0)


@pytest.mark.parametrize("head", [HeadConfig(0), HeadConfig(512, projection=True)])
def test_an_embedding_is_not_answered_as_classes(photos: Path, head: HeadConfig) -> None:
    model = MemoryViT(random_backbone(head=head))
    image = photos / "test" / "red" / "0.png"
    with pytest.raises(EngramError, match="has no classifier"):
        predict(model, [image])
    model.add_task("colours", ["red", "green", "blue"])
    assert list(predict(model, [image])[0]["tasks"]) == ["colours"]
    with pytest.raises(EngramError, match="ask for tasks"):
        predict(model, [image], tasks=["colours", "base"])


def test_probabilities_are_those_of_the_logits(model: MemoryViT, photos: Path) -> None:

    assert model.backbone.preprocessing is not None
    path = photos / "test" / "green" / "2.png"
    view = torch.from_numpy(evaluation_view(path, model.backbone.preprocessing))[None]
    logits = model(normalise(view, model.backbone.preprocessing))["colours"][0].softmax(-1)
    [answer] = predict(model, [path], tasks=["colours"])
    said = {one["class"]: one["probability"] for one in answer["tasks"]["colours"]}
    for name, probability in zip(("red", "green", "blue"), logits.tolist(), strict=True):
        assert math.isclose(said[name], probability, abs_tol=2e-6)


def test_every_form_of_an_image_gives_the_same_answer(model: MemoryViT, photos: Path) -> None:
    path = photos / "test" / "red" / "0.png"
    with Image.open(path) as image:
        image.load()
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms = (path, str(path), path.read_bytes(), image, array, array / 255, tensor, tensor / 255)
    expected = predict(model, [path])[0]["tasks"]
    for one in forms:
        assert predict(model, one)["tasks"] == expected
    for several in (list(forms), iter(forms), array[None], tensor[None]):
        assert all(answer["tasks"] == expected for answer in predict(model, several))
    assert predict(model, image)["image"] == str(path)
    assert [answer["image"] for answer in predict(model, [array, path])] == ["images[0]", str(path)]
    assert predict(model, []) == []


def test_one_unreadable_image_is_one_answer_with_an_error(model: MemoryViT, photos: Path) -> None:
    path = photos / "test" / "red" / "empty.png"
    assert predict(model, path) == {"image": str(path), "error": f"{path}: the file is empty"}


def test_what_is_no_image_is_refused(model: MemoryViT) -> None:
    for images, sentence in (
        (3, "Images were given as int"),
        ({"a.png": 1}, "Images were given as dict"),
        ([None], "images[0] is of the type NoneType"),
        (torch.randn(3, 8, 8), "leave that out"),
    ):
        with refuses(sentence):
            predict(model, images)
