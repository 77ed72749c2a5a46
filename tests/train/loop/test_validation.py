"""Estimates are honest: of images that were not learned, without flattery, with an interval."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from scipy.stats import bootstrap
from scipy.stats import t as student
from sklearn.metrics import average_precision_score
from tests.support.datasets import in_memory
from tests.support.training import learned, same, start

import engram
from engram import MemoryViT, Recipe, load_backbone
from engram.data.datasets import Splits, load
from engram.tasks.class_statistics import student_quantile
from engram.tasks.kinds import KINDS
from engram.tasks.metrics import best_temperature, temperature, wilson
from engram.train.fit import _with_folds
from engram.train.loop.task_trainer import fold_trainers
from engram.train.loop.training import Training
from engram.train.loop.validation import Estimator, HeldOut, with_held_out
from engram.train.runs.run import Run
from engram.util.processes import ProcessGroup

QUICK = Recipe(steps=6, batch=16, evaluations=1, workers=0, cache="off")


def trained(model: MemoryViT, splits: Splits) -> dict[int | None, dict[str, torch.Tensor]]:
    """By fold, the tensors of its task."""
    with _with_folds(model, "colours", splits) as names:
        trainers = fold_trainers(model, names, QUICK)
        training = Training(model, trainers, splits, QUICK, Run(None, ProcessGroup()))
        training.prepare()
        training.begin("")
        training.go()
        training.end()
        return {one.fold: {k: v.clone() for k, v in one.task.tensors().items()} for one in trainers}


def test_the_task_of_a_fold_never_learns_from_its_images(
    small_backbone: Path, colours: Path
) -> None:
    splits = with_held_out(load(colours), QUICK)
    assert splits.folds is not None
    before = trained(start(small_backbone, splits), splits)
    train = splits["train"]
    row = int((splits.folds.train == 0).nonzero()[0])
    labels = train.labels.copy()
    labels[row] = (labels[row] + 1) % 3
    wrong = replace(train, labels=labels)
    other = replace(splits, train=wrong, val=replace(wrong, split="val"))
    after = trained(start(small_backbone, other), other)
    assert same(before[0], after[0])
    assert not same(before[1], after[1])
    assert not same(before[None], after[None])


def test_what_is_kept_is_a_training_with_all_images(small_backbone: Path, colours: Path) -> None:
    splits = load(colours)
    everything = replace(splits, val=splits["train"].subset(range(3), "val"))
    kept = learned(small_backbone, splits, QUICK)
    alone = learned(small_backbone, everything, QUICK)
    for name, value in alone.items():
        assert (kept[name] - value).abs().max() <= 1e-6, name


def test_wilson_is_the_interval_of_the_books() -> None:
    low, high = wilson(0.9, 100)  # by hand, with z = 1.645
    assert (low, high) == (pytest.approx(0.8397, abs=1e-3), pytest.approx(0.9392, abs=1e-3))
    assert wilson(1.0, 10)[1] == 1.0
    assert wilson(1.0, 10)[0] == pytest.approx(10 / (10 + 1.645**2), abs=1e-6)
    assert wilson(0.5, 10)[0] < wilson(0.5, 100)[0]


def noise_answers(images: int, labels: torch.Tensor) -> HeldOut:
    return HeldOut(torch.randn(images, 4), labels, torch.arange(images))


def estimator(score: str, kind: str, splits: Splits) -> Estimator:
    return Estimator(KINDS[kind], score, splits)


def test_choosing_among_noise_is_not_flattered(colours: Path) -> None:
    splits, torch_labels = load(colours).with_folds(5), torch.randint(4, (60,))
    tried = [noise_answers(60, torch_labels) for _ in range(40)]
    kind = KINDS["classification"]
    metrics = [kind.metrics(one.pairs, {}) for one in tried]
    best = max(range(40), key=lambda i: metrics[i]["accuracy"])
    assert metrics[best]["accuracy"] > 0.33
    found = estimator("accuracy", "classification", splits)(metrics[best], tried[best], tried, {})
    assert found["held_out"] == metrics[best]["accuracy"]
    assert found["accuracy"] < 0.33
    assert found["accuracy"] == pytest.approx(0.3, abs=0.06)  # scaled to all images
    low, high = found["interval"]
    assert low < 0.25 < high


@pytest.mark.parametrize(("kind", "metric"), [("multilabel", "map"), ("regression", "r2")])
def test_the_interval_of_a_metric_is_that_of_the_bootstrap(
    kind: str, metric: str, colours: Path
) -> None:
    """Widened by what answers are worth: here one share of a tenth is held out."""
    splits = load(colours).with_validation()
    labels = (torch.rand(80, 3) < 0.4) if kind == "multilabel" else torch.randn(80, 3)
    outputs = labels.float() + torch.randn(80, 3)
    fitted = {"thresholds": torch.full((3,), 0.5), "mean": torch.zeros(3), "std": torch.ones(3)}

    def value(rows: npt.NDArray[np.int64]) -> float:
        return float(KINDS[kind].metrics((outputs[rows], labels[rows]), fitted)[metric])

    answers = HeldOut(outputs, labels, torch.arange(80))
    found = estimator(metric, kind, splits)(KINDS[kind].metrics(answers.pairs, fitted), answers,
                                            [], fitted)  # fmt: skip
    middle, worth = value(np.arange(80)), 1 + 0.1 / 0.9
    theirs = bootstrap(
        (np.arange(80),), value, vectorized=False, n_resamples=1000, confidence_level=0.9,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    assert found[metric] == middle
    for mine, other in zip(found["interval"], theirs, strict=True):
        assert (mine - middle) / worth**0.5 == pytest.approx(other - middle, rel=0.25)


def test_several_labels_an_image_are_estimated_in_folds(model: MemoryViT, splits: Splits) -> None:
    """Every image once, by a task that has not seen it: scikit-learn finds the same."""
    rng = np.random.default_rng(0)
    train = splits["train"]
    labels = np.stack([train.labels == 0, train.labels != 1, rng.random(60) < 0.3], 1)
    tagged = replace(
        splits, kind="multilabel", test=None,
        train=replace(train, labels=labels.astype(np.float32), kind="multilabel"),
    )  # fmt: skip
    model.add_task("t", splits.classes, 2, kind="multilabel", seed=0)
    result = engram.fit(model, "t", tagged, QUICK.but(calibrate="off"))
    val, held_out = result.metrics["val"], result.answers
    assert held_out is not None
    assert (val["folds"], val["images"]) == (5, 60)
    assert torch.equal(held_out.labels, torch.from_numpy(labels.astype(np.float32)))
    theirs = average_precision_score(labels, held_out.logits.numpy(), average="macro")
    assert val["held_out"] == pytest.approx(theirs, abs=1e-6)
    assert val["interval"][0] < val["map"] < val["interval"][1]


def test_an_unreadable_image_is_a_wrong_answer_of_its_fold(model: MemoryViT, photos: Path) -> None:
    shutil.rmtree(photos / "val")
    (photos / "train" / "dark" / "03.png").write_bytes(b"broken")
    splits = load(photos)
    model.add_task("t", splits.classes, 2, seed=0)
    for cache in ("on", "off"):
        result = engram.fit(model, "t", splits, QUICK.but(cache=cache))
        val, held_out = result.metrics["val"], result.answers
        assert held_out is not None
        assert len(result.unreadable) == len(held_out.failed) == 1
        assert (val["images"], len(held_out.labels)) == (40, 39)
        right = int((held_out.logits.argmax(1) == held_out.labels).sum())
        assert val["held_out"] == right / 40


def test_photographs_that_are_there_twice_are_in_one_fold(assets: Path, tmp_path: Path) -> None:
    """Stored again in another quality; other pets of the breed are not taken for copies."""
    breeds = sorted((assets / "data" / "pets" / "train").iterdir())[:3]
    for breed in breeds:
        (tmp_path / breed.name).mkdir()
        for i, path in enumerate(sorted(breed.iterdir())[:8]):
            image = Image.open(path).convert("RGB")
            image.save(tmp_path / breed.name / f"{i}.png")
            if i < 4:
                image.save(tmp_path / breed.name / f"copy-{i}.jpg", quality=85)
    backbone = load_backbone(assets / "weights" / "vit_tiny_patch16_224" / "timm.safetensors")
    model, recipe = MemoryViT(backbone), QUICK.but(cache="on")
    splits = with_held_out(load(tmp_path), recipe)
    model.add_task("t", splits.classes, regime="head")
    with _with_folds(model, "t", splits) as names:
        trainers = fold_trainers(model, names, recipe)
        training = Training(model, trainers, splits, recipe, Run(None, ProcessGroup()))
        training.prepare()
    assert splits.folds is not None
    train = splits["train"]
    folds = {train.sample_name(i): int(splits.folds.train[i]) for i in range(len(train))}
    apart = [name for name in folds if "copy-" in name and
             folds[name] != folds[name.replace("copy-", "").replace(".jpg", ".png")]]  # fmt: skip
    assert apart == []
    assert training.copies == 12


def test_any_score_has_an_interval(colours: Path) -> None:
    splits = load(colours).with_folds(5)
    labels = torch.randn(60, 1)
    answers = HeldOut(labels + 0.3 * torch.randn(60, 1), labels, torch.arange(60))
    fitted = {"mean": torch.zeros(1), "std": torch.ones(1)}
    kind = KINDS["regression"]
    found = estimator("r2", "regression", splits)(
        kind.metrics(answers.pairs, fitted), answers, [], fitted
    )
    low, high = found["interval"]
    assert low < found["r2"] < high


def test_calibrated_logits_stay_as_they_are() -> None:
    logits = torch.randn(2000, 3)
    labels = torch.distributions.Categorical(logits=logits).sample()
    assert temperature(logits[:20], labels[:20]) == 1.0
    assert temperature(8 * logits[:20], labels[:20]) == 1.0  # too few to know
    assert temperature(logits, labels) == pytest.approx(1.0, abs=0.15)
    found = temperature(4 * logits, labels)
    assert found == pytest.approx(best_temperature(4 * logits, labels), rel=0.05)
    assert found == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("freedom", [9, 20, 99])
def test_the_quantile_is_that_of_student(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(student.ppf(0.95, freedom), rel=2e-4)


def test_fit_says_how_sure_it_is_and_leaves_no_copies(model: MemoryViT, splits: Splits) -> None:
    model.add_task("t", splits.classes, 2, seed=0)
    val = engram.fit(model, "t", splits, QUICK).metrics["val"]
    assert (val["folds"], val["images"], val["learned_all"]) == (5, 60, True)
    assert val["interval"][0] <= val["accuracy"] <= val["interval"][1]
    assert list(model.tasks) == ["t"]


@pytest.mark.parametrize(
    ("images", "folds", "held_out"),
    [(40, 5, 40), (300, 5, 300), (500, 3, 300), (1_000, 2, 400), (1_500, 1, 300), (4_000, 1, 400)],
)
def test_about_three_hundred_images_are_held_out(images: int, folds: int, held_out: int) -> None:
    data = Splits("memory", ("0", "1"), train=in_memory([i % 2 for i in range(images)], 2))
    splits = with_held_out(data, QUICK)
    assert splits.folds is not None
    assert (splits.folds.count, len(splits.held_out)) == (folds, held_out)
    assert with_held_out(data, QUICK.but(folds=5)).folds.count == 5  # type: ignore[union-attr]
