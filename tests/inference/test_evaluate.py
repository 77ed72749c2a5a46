"""Evaluation: nothing unreadable is left out silently; workers and engines change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import engram
from engram import EngramError, MemoryViT
from engram.data.datasets import load
from engram.inference.engine import OneByOne, TorchEngine
from engram.inference.evaluate import answers, evaluate


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
    assert found["images"] == 4
    assert found["unreadable"] == [str(photos / "test" / "red" / "empty.png")] * 2
    readable = evaluate(model, table, "colours", workers=0, skip_bad=True)
    assert found["accuracy"] * 4 == readable["accuracy"] * 2


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
    with pytest.raises(EngramError, match="label '0'"):
        evaluate(model, "digits", "colours", workers=0)
    with pytest.raises(EngramError, match=r"has 3 classes \(red, green, blue\)"):
        evaluate(model, load("digits"), "colours", workers=0)
    with pytest.raises(EngramError, match="There is no task 'flowers'"):
        evaluate(model, "digits", "flowers")


def test_any_engine_may_compute_the_outputs(model: MemoryViT, colours: Path) -> None:
    test = load(colours)["test"]
    plain = answers(model, test, "colours", workers=0)
    asked = OneByOne(TorchEngine(model, exact=True))
    other = answers(model, test, "colours", workers=0, engine=asked)
    assert torch.allclose(plain.logits, other.logits, atol=1e-5)
    assert torch.equal(plain.samples, other.samples)
    assert other.metrics()["accuracy"] == evaluate(model, colours, "colours", workers=0)["accuracy"]


def test_evaluate_is_public() -> None:
    assert engram.evaluate is evaluate
