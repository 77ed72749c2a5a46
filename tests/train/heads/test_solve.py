"""Solved heads are what scikit-learn finds, and a readout is written as it was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from tests.support.datasets import in_memory
from tests.support.engrams import small_backbone as backbone_of_two_layers
from tests.support.training import as_written
from torch import Tensor

import engram
from engram import EngramError, MemoryViT, Recipe, ViT
from engram.data.datasets import Splits
from engram.data.folds import Folds
from engram.methods import Readout
from engram.tasks.task import Task
from engram.train.heads import solve
from engram.train.heads.columns import Columns, Reads
from engram.train.heads.solve import Images, Rows, Solution, Solver, SolverSetting
from engram.util.processes import ProcessGroup

QUICK = Recipe(steps=4, batch=16, evaluations=2, workers=0)
WIDTH, FEATURES = 16, 3 * 3 * 16
GRID = 3 * 16 * WIDTH  # behind the features
ALL = Readout(3, grid=True)


def batches(values: Tensor, labels: Tensor) -> list[Rows]:
    """Twenty images each."""
    parts = (torch.split(x, 20) for x in (values.half(), labels, torch.arange(len(labels))))
    return [Rows(*part) for part in zip(*parts, strict=True)]


@pytest.fixture
def backbone() -> ViT:
    return backbone_of_two_layers()


@pytest.fixture
def seen(backbone: ViT) -> Tensor:
    """Layer statistics of 72 images that differ in colour, with noise, as the cache keeps them."""
    tints = torch.randn(72, 3, 1, 1)
    model = MemoryViT(backbone)
    model.add_task("all", 2, regime="readout", grid=True)
    with torch.no_grad():
        rows = model.embed(tints + 0.5 * torch.randn(72, 3, 16, 16), ["all"])["all"]
    return rows.half().float()


def solver_of(
    backbone: ViT,
    kind: str,
    seen: Tensor,
    labels: Tensor,
    classes: int,
    *,
    folds: Folds | None = None,
    bad: int = 0,
    **recipe: Any,
) -> Solver:
    model = MemoryViT(backbone)
    model.add_task("t", classes, regime="readout", kind=kind, grid=True)
    train = replace(in_memory([0] * 48, 1), labels=labels[:48].numpy())
    splits = Splits("given", ("any",), train=train, folds=folds)
    task, held_out = model.task("t"), batches(seen[48:], labels[48:])
    images = Images(
        Columns.for_task(task, backbone),
        batches(seen[:48], labels[:48]),
        None if folds else held_out,
    )
    solver = Solver(task, images, splits, Recipe(**recipe), ProcessGroup())
    solver.unreadable = bad
    return solver


def in_folds(count: int) -> Folds:
    """Every image is held out once."""
    dealt = torch.arange(48) % count
    return Folds(count, count, 0, dealt)


def chosen(found: Solution) -> SolverSetting:
    """The setting that was solved."""
    return next(one for one in found.tried if one.answers is found.answers)


def standardised(seen: Tensor, found: Solution) -> np.ndarray:
    """What the solver's penalty is about, from scratch."""
    columns = dense(found).shape[-1]
    x = seen[:, :columns].double().numpy()
    deviation = x[:48].std(0)
    x = np.where(deviation > 1e-5, (x - x[:48].mean(0)) / np.maximum(deviation, 1e-5), 0)
    x[:, WIDTH:] *= chosen(found).alpha
    x[:, FEATURES:] /= 2
    return np.asarray(x / WIDTH**0.5)


@pytest.fixture
def as_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads see all statistics: they are not factorised."""
    monkeypatch.setattr(solve, "MOST_CLASSES", 0)


def dense(found: Solution) -> Tensor:
    """The weight for all statistics: the product of the factors, where there are two."""
    if "projection" not in found.tensors:
        return found.weight
    pooled, own = found.weight[..., :WIDTH], found.weight[..., WIDTH:]
    return torch.cat([pooled, own @ found.tensors["projection"]], -1)


def outputs(seen: Tensor, found: Solution, head: int = -1) -> Tensor:
    weight = dense(found)[head]
    return seen[:, : weight.shape[-1]] @ weight.T + found.bias[head]


def classifier(penalty: float) -> LogisticRegression:
    return LogisticRegression(C=1 / penalty, max_iter=10_000, tol=1e-8)


@pytest.mark.usefixtures("as_solved")
@pytest.mark.parametrize(
    ("what", "features"),
    [(None, WIDTH), (Readout(1), 3 * WIDTH), (Readout(3), FEATURES), (ALL, FEATURES + GRID)],
)
def test_a_classifier_is_the_one_of_scikit_learn(
    backbone: ViT, seen: Tensor, what: Reads, features: int
) -> None:
    labels = (seen[:, :3] + 0.3 * torch.randn(72, 3)).argmax(1)
    found = solver_of(backbone, "classification", seen, labels, 3).best([what])
    assert found.reads == what
    assert found.weight.shape == (1, 3, features)
    x = standardised(seen, found)
    peer = classifier(chosen(found).penalty).fit(x[:48], labels[:48].numpy())
    answers = outputs(seen, found).softmax(1).numpy()
    assert np.abs(answers - peer.predict_proba(x)).max() < 0.01
    accuracy = (answers[48:].argmax(1) == labels[48:].numpy()).mean()
    assert found.metrics["accuracy"] == pytest.approx(accuracy)


@pytest.mark.usefixtures("as_solved")
@pytest.mark.parametrize("what", [None, ALL], ids=["primal", "dual"])
def test_the_classifier_of_a_fold_is_the_one_of_scikit_learn_without_its_images(
    backbone: ViT, seen: Tensor, what: Reads
) -> None:
    """And the last is the one of all images; what is measured are answers for held-out images."""
    labels = (seen[:, :3] + 0.3 * torch.randn(72, 3)).argmax(1)
    folds = in_folds(3)
    found = solver_of(backbone, "classification", seen, labels, 3, folds=folds).best([what])
    assert len(found.weight) == 4
    x, penalty = standardised(seen, found), chosen(found).penalty
    held_out = torch.zeros(48, 3)
    for fold in range(4):
        rows = (folds.train != fold).numpy()
        peer = classifier(penalty).fit(x[:48][rows], labels[:48].numpy()[rows])
        answers = outputs(seen, found, fold).softmax(1)
        assert np.abs(answers.numpy() - peer.predict_proba(x)).max() < 0.01
        held_out[~rows] = outputs(seen, found, fold)[:48][~rows]
    assert torch.allclose(found.answers.outputs, held_out, atol=2e-3)
    assert torch.equal(found.answers.samples, torch.arange(48))
    accuracy = (held_out.argmax(1) == labels[:48]).double().mean()
    assert found.metrics["accuracy"] == pytest.approx(float(accuracy))


@pytest.mark.usefixtures("as_solved")
@pytest.mark.parametrize("what", [None, Readout(3), ALL])
def test_numbers_are_those_of_ridge_regression(
    backbone: ViT, seen: Tensor, what: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = seen[:, [2, 40]] * torch.tensor([100.0, 0.1]) + torch.tensor([7.0, -1.0])
    labels = labels + 0.3 * labels.std(0) * torch.randn(72, 2)
    monkeypatch.setattr(solve, "_ITERATIONS", 400)  # to the end
    found = solver_of(backbone, "regression", seen, labels, 2).best([what])
    x = standardised(seen, found)
    mean, std = labels[:48].mean(0), labels[:48].std(0, correction=0)
    assert found.fitted["mean"].numpy() == pytest.approx(mean.numpy(), rel=1e-4)
    peer = Ridge(alpha=chosen(found).penalty).fit(x[:48], ((labels[:48] - mean) / std).numpy())
    gap = outputs(seen, found).numpy() - peer.predict(x)
    assert np.abs(gap).max() < 0.005
    assert found.metrics["r2"] > 0


@pytest.mark.usefixtures("as_solved")
def test_several_labels_are_as_many_classifiers(backbone: ViT, seen: Tensor) -> None:
    labels = (seen[:, [1, 20]] + 0.2 * torch.randn(72, 2) > seen[:, [1, 20]].mean(0)).long()
    found = solver_of(backbone, "multilabel", seen, labels, 2).best([Readout(1)])
    x, penalty = standardised(seen, found), chosen(found).penalty
    answers = outputs(seen, found).sigmoid().numpy()
    for c in range(2):
        peer = classifier(2 * penalty).fit(x[:48], labels[:48, c].numpy())
        assert np.abs(answers[:, c] - peer.predict_proba(x)[:, 1]).max() < 0.01
    assert 0 < found.fitted["thresholds"].min() <= found.fitted["thresholds"].max() < 1


@pytest.mark.parametrize("count", [0, 3], ids=["held out", "folds"])
def test_a_factorised_head_of_full_rank_is_the_head_on_everything(
    backbone: ViT, seen: Tensor, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for half precision; what was measured are the answers of the factorised one."""
    labels = (seen[:, :12] + 0.3 * torch.randn(72, 12)).argmax(1)
    folds = in_folds(count) if count else None
    found = solver_of(backbone, "classification", seen, labels, 12, folds=folds).best([Readout(3)])
    projection = found.tensors["projection"]
    assert found.reads == Readout(3, projected=12)
    assert projection.shape == (count + 1, 12, FEATURES - WIDTH)
    assert torch.equal(projection, projection.half().float())
    assert found.weight.shape == (count + 1, 12, WIDTH + 12)
    if folds is not None:
        own = [outputs(seen, found, fold)[:48][folds.train == fold] for fold in range(count)]
        kept = [found.answers.outputs[folds.train == fold] for fold in range(count)]
        assert torch.allclose(torch.cat(kept), torch.cat(own), atol=1e-3)
    monkeypatch.setattr(solve, "MOST_CLASSES", 0)
    whole = solver_of(backbone, "classification", seen, labels, 12, folds=folds).best([Readout(3)])
    assert torch.allclose(outputs(seen, found), outputs(seen, whole), atol=0.02)


def test_a_lower_rank_is_taken_unless_it_loses(
    backbone: ViT, seen: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = (seen[:, :12] + 0.3 * torch.randn(72, 12)).argmax(1)
    monkeypatch.setattr(solve, "_SMALL", 0)
    monkeypatch.setattr(solve, "RANKS", (4, 8))
    for loss, rank in ((1.0, 4), (-1.0, 12)):  # anything is good enough, nothing is
        monkeypatch.setattr(solve, "_LOSS", loss)
        found = solver_of(backbone, "classification", seen, labels, 12).best([Readout(3)])
        assert found.reads.projected == rank
        assert found.weight.shape == (1, 12, WIDTH + rank)
        assert torch.allclose(found.answers.outputs, outputs(seen, found)[48:], atol=1e-3)


def test_statistics_that_do_not_fit_the_memory_are_read_again(
    backbone: ViT, seen: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = seen[:, :3].argmax(1)
    kept = solver_of(backbone, "classification", seen, labels, 3).best([None, Readout(3)])
    monkeypatch.setattr(solve, "_IN_MEMORY", 1)
    read = solver_of(backbone, "classification", seen, labels, 3).best([None, Readout(3)])
    assert chosen(read)[:3] == chosen(kept)[:3]
    assert torch.equal(read.weight, kept.weight)
    assert torch.equal(read.bias, kept.bias)


@pytest.mark.usefixtures("as_solved")
def test_what_is_chosen_on_a_share_is_solved_with_all(
    backbone: ViT, seen: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = (seen[:, :3] + 0.3 * torch.randn(72, 3)).argmax(1)
    monkeypatch.setattr(solve, "_SEARCH", 10)
    found = solver_of(backbone, "classification", seen, labels, 3).best([Readout(3)])
    x = standardised(seen, found)
    peer = classifier(chosen(found).penalty).fit(x[:48], labels[:48].numpy())
    assert np.abs(outputs(seen, found).softmax(1).numpy() - peer.predict_proba(x)).max() < 0.01


def test_a_statistic_that_never_changes_counts_for_nothing(backbone: ViT, seen: Tensor) -> None:
    """Its deviation is zero; on other images it may be anything."""
    labels, constant = seen[:, :3].argmax(1), [5, WIDTH + 1, FEATURES - 1]
    seen[:, constant] = torch.tensor([0.0, 3.0, -2.0])
    found = solver_of(backbone, "classification", seen, labels, 3).best([Readout(3)])
    assert bool(dense(found).isfinite().all())
    assert bool(found.bias.isfinite().all())
    assert not dense(found)[..., constant].any()


def test_unreadable_validation_images_count_as_wrong(backbone: ViT, seen: Tensor) -> None:
    labels = seen[:, :3].argmax(1)
    scores = [
        solver_of(backbone, "classification", seen, labels, 3, bad=bad).best([None]).metrics
        for bad in (0, 24)
    ]
    assert scores[1]["images"] == 48
    assert scores[1]["accuracy"] == pytest.approx(scores[0]["accuracy"] / 2)


def test_a_solved_head_has_class_weights_in_place_of_a_sampler(backbone: ViT, seen: Tensor) -> None:
    labels = (seen[:, 0] + seen[:, 1] > seen[:, 0].quantile(0.9)).long()
    found = {}
    for balance in ("none", "weights", "sampler"):
        solver = solver_of(backbone, "classification", seen, labels, 2, balance=balance)
        found[balance] = solver.best([None])
    assert torch.equal(found["weights"].weight, found["sampler"].weight)
    assert not torch.equal(found["weights"].weight, found["none"].weight)


# fit


def readout(backbone: ViT, splits: Splits, kind: str = "classification") -> tuple[MemoryViT, Task]:
    model = MemoryViT(backbone)
    return model, model.add_task("t", splits.classes, regime="readout", kind=kind)


@pytest.mark.parametrize("cache", ["on", "off"])
def test_fit_writes_a_readout_that_answers_as_it_was_measured(
    cache: str, model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    out, backbone = tmp_path / "t.safetensors", model.backbone
    model, task = readout(backbone, splits)
    assert task.spec.method == Readout(layers=3)
    recipe = QUICK.but(cache=cache, refit=False)
    result = engram.fit(model, "t", splits, recipe, out=out, test=True)
    assert result.regime == "readout"
    written = engram.inspect(out)
    assert written.spec == model.task("t").spec
    method = written.spec.method
    assert isinstance(method, Readout)
    assert (method.layers, method.grid) in ((1, False), (3, False), (3, True))
    features = method.layers * 3 + method.grid * 3 * 16
    assert written.tensors["head.weight"].shape == (3, 32 + 3)
    assert written.tensors["projection"].shape == (3, (features - 1) * 32)
    assert written.tensors["projection"].dtype == torch.float16
    assert result.parameters == written.parameters
    other = MemoryViT(backbone)
    other.attach(out)
    held = splits.with_validation()
    for split in ("val", "test"):
        again = engram.evaluate(other, held, "t", split=split, workers=0)
        assert again["accuracy"] == result.metrics[split]["accuracy"]
        assert again["loss"] == pytest.approx(result.metrics[split]["loss"], abs=1e-3)
    assert written.metrics == as_written(result.metrics)


def test_a_finished_readout_is_resumed_as_a_success(
    model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    out, backbone = tmp_path / "t.safetensors", model.backbone
    first = engram.fit(readout(backbone, splits)[0], "t", splits, QUICK, out=out)
    written = out.stat().st_mtime_ns
    again, _ = readout(backbone, splits)
    second = engram.fit(again, "t", splits, QUICK, out=out, resume=True)
    assert out.stat().st_mtime_ns == written
    assert second.metrics == first.metrics
    assert second.parameters == first.parameters
    assert again.engram("t").content == engram.inspect(out).content


@pytest.mark.parametrize("reads", [Readout(1), ALL])
def test_a_finished_readout_is_resumed_whatever_it_reads(
    reads: Readout,
    model: MemoryViT,
    splits: Splits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Columns, "choices", (reads,))
    out, backbone = tmp_path / "t.safetensors", model.backbone
    engram.fit(readout(backbone, splits)[0], "t", splits, QUICK, out=out)
    method = engram.inspect(out).spec.method
    assert isinstance(method, Readout)
    assert (method.layers, method.grid) == (reads.layers, reads.grid)
    again, _ = readout(backbone, splits)
    engram.fit(again, "t", splits, QUICK, out=out, resume=True)
    assert again.engram("t").content == engram.inspect(out).content


def test_a_readout_changes_no_other_task(model: MemoryViT, splits: Splits) -> None:
    pixels = torch.rand(3, 3, 16, 16)
    torch.nn.init.normal_(model.add_task("other", 2, seed=0).head.weight)
    before = model.eval()(pixels, tasks=["other"], exact=True)["other"]
    model.add_task("t", splits.classes, regime="readout")
    engram.fit(model, "t", splits, QUICK)
    assert torch.equal(model(pixels, tasks=["other"], exact=True)["other"], before)
    assert list(model.tasks) == ["other", "t"]


@pytest.mark.parametrize("regime", ["side+readout", "masked+adapter+readout"])
def test_an_average_is_not_trained(regime: str, model: MemoryViT, splits: Splits) -> None:
    model.add_task("t", splits.classes, regime=regime)
    with pytest.raises(EngramError, match=r"engram\.auto"):
        engram.fit(model, "t", splits, QUICK)


@pytest.mark.parametrize("regime", ["readout", "side+readout"])
def test_solved_regimes_are_not_swept(regime: str, model: MemoryViT, splits: Splits) -> None:
    with pytest.raises(EngramError, match="is solved"):
        engram.sweep(model, "t", splits, QUICK, regime=regime, seeds=2)
