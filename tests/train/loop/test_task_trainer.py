"""One task in training: how large a step is, and what its loss is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.support.training import start

from engram import Recipe
from engram.data.datasets import load
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.runs.result import Ending


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_is_clipped_and_as_large_as_the_rate_says(
    optimizer: str, small_backbone: Path, colours: Path
) -> None:
    splits = load(colours)
    model = start(small_backbone, splits)
    recipe = Recipe(optimizer=optimizer, lr=0.5, warmup=0, weight_decay=0, clip=1.0)
    trainer = TaskTrainer(model, "colours", recipe)
    before = [p.detach().clone() for p in trainer.parameters]
    for parameter in trainer.parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    trainer.step(0, 10)
    moved = torch.cat([(p - b).flatten() for p, b in zip(trainer.parameters, before, strict=True)])
    if optimizer == "sgd":
        assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)  # rate × clipped norm
    else:
        assert moved.abs().max().item() == pytest.approx(0.5, rel=1e-2)


def test_label_smoothing_is_that_of_torch(small_backbone: Path, colours: Path) -> None:
    model = start(small_backbone, load(colours))
    trainer = TaskTrainer(model, "colours", Recipe(label_smoothing=0.2))
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum")(logits, labels)
    assert trainer.loss(logits, [(labels, None)]).item() == pytest.approx(expected.item())


def test_class_weights_let_every_class_count_the_same(small_backbone: Path, colours: Path) -> None:
    splits = load(colours)
    trainer = TaskTrainer(start(small_backbone, splits), "colours", Recipe(balance="weights"))
    labels = torch.tensor([0] * 6 + [1] * 3)  # and no image of the third
    trainer.prepare(labels.numpy())
    assert trainer.weights is not None
    assert trainer.weights.tolist() == [0.75, 1.5, 0.0]
    assert trainer.weights[labels].mean() == 1
    logits = torch.randn(9, 3)
    expected = torch.nn.functional.cross_entropy(logits, labels, trainer.weights, reduction="sum")
    found = trainer.loss(logits, [(labels, None)])
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_fp16_halves_its_scale_when_gradients_overflow(small_backbone: Path, colours: Path) -> None:
    model = start(small_backbone, load(colours))
    trainer = TaskTrainer(model, "colours", Recipe(precision="fp16", warmup=0, clip=0))
    before = copy.deepcopy(trainer.parameters)
    for parameter in trainer.parameters:
        parameter.grad = torch.full_like(parameter, torch.inf)
    trainer.step(0, 10)
    assert trainer.scale == 32768
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
    for parameter in trainer.parameters:
        parameter.grad = torch.full_like(parameter, 32768.0)
    trainer.step(1, 10)
    assert trainer.scale == 32768
    assert not torch.equal(before[0], trainer.parameters[0])
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in trainer.parameters)


def pushed(trainer: TaskTrainer, step: int) -> list[torch.Tensor]:
    """The parameters after a step along a gradient that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    for parameter in trainer.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    trainer.step(step, 10)
    return [parameter.detach().clone() for parameter in trainer.parameters]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_restored_learner_goes_on_as_the_first_would_have(
    optimizer: str, small_backbone: Path, colours: Path
) -> None:
    splits = load(colours)
    recipe = Recipe(optimizer=optimizer, lr=0.1, ema=0.9, patience=2)
    first = TaskTrainer(start(small_backbone, splits), "colours", recipe)
    for step in range(3):
        pushed(first, step)
    first.record({"accuracy": 0.5, "loss": 1.0, "images": 50}, 3)
    second = TaskTrainer(start(small_backbone, splits), "colours", recipe)
    kept = {name: value.clone() for name, value in first.tensors().items()}
    second.restore(kept, first.about())
    assert (second.best_score, second.best_step, second.since_best) == (0.5, 3, 0)
    for step in (3, 4):
        for a, b in zip(pushed(first, step), pushed(second, step), strict=True):
            assert torch.equal(a, b)
    for trainer in (first, second):
        trainer.finish(5, 10, 2)
    assert first.ending == second.ending == Ending(5, 10, 2, kept=3, patience=2)
    assert all(map(torch.equal, first.parameters, second.parameters))


def test_the_average_takes_the_place_of_the_weights_and_gives_it_back(
    small_backbone: Path, colours: Path
) -> None:
    recipe = Recipe(optimizer="sgd", lr=0.1, ema=0.9)
    trainer = TaskTrainer(start(small_backbone, load(colours)), "colours", recipe)
    now = pushed(trainer, 0)
    trainer.swap_average()
    assert not any(map(torch.equal, now, trainer.parameters))
    trainer.swap_average()
    assert all(map(torch.equal, now, trainer.parameters))


def test_patience_counts_validations_without_a_better_score(
    small_backbone: Path, colours: Path
) -> None:
    trainer = TaskTrainer(start(small_backbone, load(colours)), "colours", Recipe(patience=2))
    seen = []
    for step, score in enumerate((0.5, 0.4, 0.6, 0.6, 0.1, 0.9)):
        trainer.record({"accuracy": score, "loss": 1 - score, "images": 1000}, step)
        seen.append(trainer.done)
    assert seen == [False, False, False, False, True, True]
    assert (trainer.best_score, trainer.best_step, trainer.last_step) == (0.6, 2, 4)
    endless = TaskTrainer(start(small_backbone, load(colours)), "colours", Recipe(patience=0))
    for step in range(50):
        endless.record({"accuracy": 0.5, "images": 50}, step)
    assert not endless.done


def test_of_equal_scores_the_lower_loss_is_better_but_only_a_clear_fall_is_worth_more_patience(
    small_backbone: Path, colours: Path
) -> None:
    trainer = TaskTrainer(start(small_backbone, load(colours)), "colours", Recipe(patience=2))
    waited = []
    for step, loss in enumerate((0.5, 0.4, 0.399, 0.398)):
        trainer.record({"accuracy": 1.0, "loss": loss, "images": 50}, step)
        waited.append(trainer.since_best)
    assert waited == [0, 0, 1, 2]
    assert trainer.done
    assert (trainer.best_step, trainer.best_loss) == (3, 0.398)
    trainer = TaskTrainer(start(small_backbone, load(colours)), "colours", Recipe(patience=2))
    for step, (score, loss) in enumerate(((0.5, 0.9), (0.4, 0.1), (0.49, 0.2), (0.48, 0.3))):
        trainer.record({"accuracy": score, "loss": loss, "images": 10_000}, step)
    assert trainer.done  # a score that comes back to where it was has not risen
    assert trainer.best_step == 0


def test_one_answer_more_is_noise_and_the_lower_loss_is_kept(
    small_backbone: Path, colours: Path
) -> None:
    trainer = TaskTrainer(start(small_backbone, load(colours)), "colours", Recipe(patience=9))
    kept = []
    for step, (right, loss) in enumerate(((48, 0.9), (50, 0.8), (49, 0.3), (44, 0.1), (49, 0.4))):
        trainer.record({"accuracy": right / 50, "loss": loss, "images": 50}, step)
        kept.append(trainer.best_step)
    assert kept == [0, 1, 2, 2, 2]


def test_without_patience_the_last_weights_are_kept(small_backbone: Path, colours: Path) -> None:
    trainer = TaskTrainer(
        start(small_backbone, load(colours)), "colours", Recipe(patience=0, ema=0)
    )
    trainer.record({"accuracy": 0.9, "images": 50}, 1)
    last = pushed(trainer, 1)
    trainer.record({"accuracy": 0.1, "images": 50}, 2)
    trainer.finish(2, 2, 1)
    assert all(map(torch.equal, last, trainer.parameters))
    assert trainer.ending == Ending(2, 2, 1, kept=2, patience=0)
