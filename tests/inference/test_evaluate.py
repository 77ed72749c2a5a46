"""Metrics are those of scikit-learn; nothing unreadable is left out silently."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics as sk

import engram
from engram import EngramError, MemoryViT, evaluate, load_trunk, random_trunk
from engram.data.datasets import load
from engram.inference.predict import predict
from engram.tasks.metrics import classification_metrics
from engram.vit import HeadConfig


def answers(images: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator) * 2
    logits[torch.arange(images), labels] += 1.5
    return logits, labels


@pytest.mark.parametrize(("images", "classes"), [(500, 12), (40, 30), (60, 2)])
def test_metrics_are_those_of_scikit_learn(images: int, classes: int) -> None:
    logits, labels = answers(images, classes)
    parts = list(zip(logits.split(17), labels.split(17), strict=True))
    found = classification_metrics(parts)
    probability, said = logits.double().softmax(1).numpy(), logits.argmax(1).numpy()
    every = list(range(classes))
    assert found["images"] == images
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(labels, said))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(labels, said, average="macro"), abs=1e-6)
    assert found["loss"] == pytest.approx(sk.log_loss(labels, probability, labels=every), abs=1e-5)
    assert found["ece"] == pytest.approx(calibration_error(probability, labels.numpy()), abs=1e-6)
    if classes > 5:
        top5 = sk.top_k_accuracy_score(labels, probability, k=5, labels=every)
        assert found["top5"] == pytest.approx(top5)
    else:
        assert "top5" not in found


def calibration_error(probability: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """By its definition, bin by bin."""
    sure, right = probability.max(1), probability.argmax(1) == labels
    total = 0.0
    for b in range(bins):
        inside = (sure >= b / bins) & ((sure < (b + 1) / bins) | (b == bins - 1))
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
    return total


def test_an_unreadable_image_is_a_wrong_answer() -> None:
    logits, labels = torch.eye(4) * 9, torch.arange(4)
    found = classification_metrics([(logits, labels)], unreadable=4)
    assert (found["accuracy"], found["images"]) == (0.5, 8)
    assert classification_metrics([], unreadable=3) == {"accuracy": 0.0, "images": 3}


@pytest.fixture
def model(small_trunk: Path) -> MemoryViT:
    model = MemoryViT(load_trunk(small_trunk))
    task = model.add_task("colours", ["red", "green", "blue"], seed=0)
    torch.nn.init.normal_(task.head.weight)
    return model


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve pictures to test on, three of which cannot be read."""
    rng = np.random.default_rng(0)
    for name in ("red", "green", "blue"):
        folder = tmp_path / "photos" / "test" / name
        folder.mkdir(parents=True)
        for i in range(3):
            Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(
                folder / f"{i}.png"
            )
        (folder / "empty.png").write_bytes(b"")
    return tmp_path / "photos"


def test_unreadable_images_are_counted_and_named(model: MemoryViT, photos: Path) -> None:
    counted = evaluate(model, photos, "colours", workers=0)
    skipped = evaluate(model, photos, "colours", workers=0, skip_bad=True)
    assert (counted["images"], skipped["images"]) == (12, 9)
    assert counted["accuracy"] * 12 == pytest.approx(skipped["accuracy"] * 9)
    names = [str(photos / "test" / name / "empty.png") for name in ("blue", "green", "red")]
    assert counted["unreadable"] == skipped["unreadable"] == names


def test_an_unreadable_image_in_two_rows_is_two_wrong_answers(
    model: MemoryViT, photos: Path
) -> None:
    rows = ["red/0.png,red", "red/empty.png,red", "blue/0.png,blue", "red/empty.png,red"]
    table = photos / "test" / "t.csv"
    table.write_text("\n".join(["path,label", *rows]))
    found = evaluate(model, table, "colours", workers=0)
    assert (found["images"], len(found["unreadable"])) == (4, 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [1, 64])
def test_workers_and_batches_change_nothing(
    model: MemoryViT, colours: Path, workers: int, batch: int
) -> None:
    found = evaluate(model, colours, "colours", workers=workers, batch=batch)
    expected = evaluate(model, load(colours), "colours", workers=0, batch=5)
    assert {k: v for k, v in found.items() if k not in ("loss", "ece")} == {
        k: v for k, v in expected.items() if k not in ("loss", "ece")
    }
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_data_of_other_classes_is_a_sentence(model: MemoryViT) -> None:
    with pytest.raises(EngramError, match="the test split has the label '0', which is none of"):
        evaluate(model, "digits", "colours", workers=0)
    with pytest.raises(EngramError, match=r"has 3 classes \(red, green, blue\), but digits has 10"):
        evaluate(model, load("digits"), "colours", workers=0)
    with pytest.raises(EngramError, match="There is no task 'flowers'"):
        evaluate(model, "digits", "flowers")


def test_predict_gives_the_top_classes_of_every_task(model: MemoryViT, photos: Path) -> None:
    other = model.add_task("more", 9, seed=1)
    torch.nn.init.normal_(other.head.weight)
    images = [photos / "test" / "red" / name for name in ("0.png", "empty.png", "1.png")]
    first, broken, second = predict(model, images, top_k=2, batch=1)
    assert first["image"] == str(images[0])
    assert list(first["tasks"]) == ["base", "colours", "more"]
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


def test_an_embedding_is_not_told_as_classes(photos: Path) -> None:
    model = MemoryViT(random_trunk(head=HeadConfig(0)))
    image = photos / "test" / "red" / "0.png"
    with pytest.raises(EngramError, match="has no classes, so there is no 'base' to tell of"):
        predict(model, [image])
    model.add_task("colours", ["red", "green", "blue"])
    assert list(predict(model, [image])[0]["tasks"]) == ["colours"]
    with pytest.raises(EngramError, match="ask for tasks"):
        predict(model, [image], tasks=["colours", "base"])


def test_probabilities_are_those_of_the_logits(model: MemoryViT, photos: Path) -> None:
    from engram.images.preprocessing import normalise
    from engram.images.views import evaluation_view

    assert model.trunk.preprocessing is not None
    path = photos / "test" / "green" / "2.png"
    view = torch.from_numpy(evaluation_view(path, model.trunk.preprocessing))[None]
    logits = model(normalise(view, model.trunk.preprocessing))["colours"][0].softmax(-1)
    [answer] = predict(model, [path], tasks=["colours"])
    said = {one["class"]: one["probability"] for one in answer["tasks"]["colours"]}
    for name, probability in zip(("red", "green", "blue"), logits.tolist(), strict=True):
        assert math.isclose(said[name], probability, abs_tol=2e-6)


def test_evaluate_is_public() -> None:
    assert engram.evaluate is evaluate
    assert callable(engram.fit)
