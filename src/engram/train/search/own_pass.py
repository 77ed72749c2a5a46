"""`fit --own-pass`: regimes that change the backbone's own tokens, tried after all that do not.

`memory`, `adapter` and `full` train through the backbone, one after another, for as long as the
recipe says, each at the rate that suits it. To train every one of them for every fold would take as
many trainings as there are folds, so the first fold holds out for all: the best that shares the
pass and these are compared on the same images, which none of them learned from. One of these is
kept only where it is better than a tie: tasks that leave the backbone alone answer in one pass
together, and it cannot join them. It is then trained once more, with all images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from engram.data.datasets import Splits
from engram.data.folds import NONE, Folds
from engram.errors import EngramError, flag
from engram.inference.evaluate import answers
from engram.methods import METHODS, FullAdapter, FullMemory
from engram.methods.full_attention import FullTuning
from engram.store.engram import Engram
from engram.tasks.kinds import KINDS
from engram.tasks.task_settings import TaskSettings
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.validation import Estimator, HeldOut, best_of, ties
from engram.train.recipe import learning_rate
from engram.train.runs.result import Tried
from engram.train.search.variants import SweepRunner, Trained, Variant
from engram.util.progress import labelled

#: The regimes that are tried, those with the fewest parameters first.
OWN_PASS = (FullMemory.name, FullAdapter.name, FullTuning.name)


class OwnPassResult(NamedTuple):
    """All that was tried, and what was kept of it."""

    tried: Sequence[Tried]
    kept: Trained | None  # trained with all images; None: none beats what shares the pass
    told: str  # what the gain is, and what it costs


def check_own_pass(runner: SweepRunner) -> None:
    """Refuse tasks that extend others, and a model whose other tasks could not stay."""
    if runner.task.extends:
        raise EngramError(
            f"{flag('own_pass')} tries regimes that change the backbone's own tokens, and "
            f"their tasks extend no others; leave out {flag('own_pass')} or {flag('extends')}."
        )
    for regime in OWN_PASS:
        runner.check_names([_variant(runner, regime)])


def best_own_pass(runner: SweepRunner, shared: TaskTrainer) -> OwnPassResult:
    """Train tasks that need a pass of their own, and compare them with the best that shares one."""
    one, progress = first_fold(runner.splits), runner.run.progress
    learning = replace(runner, splits=_without_held_out(one))
    kind = KINDS[one.kind]
    score = kind.score_with(runner.recipe.balance)
    trained, held_out = [], [_of_first_fold(shared.held_out, runner.splits)]
    metrics: list[Mapping[str, Any]] = [kind.metrics(held_out[0].pairs, shared.task.head.fitted)]
    for i, regime in enumerate(OWN_PASS):
        variant = _variant(runner, regime)
        trained.append(learning.one(f"{i}", variant, labelled(progress, regime)))
        held_out.append(_answers(runner, trained[i].engram, one))
        metrics.append(trained[i].metrics)
    at, shared_regime = best_of(score, metrics), shared.task.spec.regime
    images = len(held_out[0].labels)
    tried = [_tried(one) for one in trained]
    if 0 in ties(score, metrics):
        told = (
            f"none of {', '.join(OWN_PASS)} is clearly better than {shared_regime} "
            f"({kind.shown(float(metrics[0][score]))} of {images:,} held-out images, the best "
            f"of them {kind.shown(max(one.score for one in trained))}); kept what shares a pass"
        )
        return OwnPassResult(tried, None, told)
    kept, regime = trained[at - 1], OWN_PASS[at - 1]
    fitted = {n: kept.engram.tensors[f"head.{n}"] for n in kind.fitted}
    estimate = Estimator(kind, score, one)(kept.metrics, held_out[at], held_out, fitted)
    told = (
        f"{regime} has {kind.shown(kept.score)} of {images:,} held-out images, "
        f"{shared_regime} {kind.shown(float(metrics[0][score]))}; the price: every image goes "
        f"through the backbone once more for this task, and it answers in no pass with others"
    )
    if one.folds is not None:
        everything = replace(runner, splits=replace(one, folds=None))
        kept = everything.train_again(kept, labelled(progress, f"{regime} with all images"))
    tried[at - 1] = replace(tried[at - 1], kept=True)
    return OwnPassResult(tried, replace(kept, metrics=estimate), told)


def _tried(one: Trained) -> Tried:
    ending = one.ending
    return Tried.create(
        one.engram, one.measured_by, one.metrics,
        lr=one.variant.recipe.lr, how="trained", own_pass=True,
        epochs=round(ending.steps / ending.per_epoch, 2) if ending else 0.0,
    )  # fmt: skip


def _variant(runner: SweepRunner, regime: str) -> Variant:
    """A task of a regime, at the rate that suits it or was given."""
    recipe, own = runner.recipe, runner.task.method(regime, lenient=True).settings()
    task = TaskSettings(regime, (), runner.task.class_init, own)
    return Variant(task, recipe.but(lr=learning_rate(recipe, METHODS[regime])))


def _answers(runner: SweepRunner, engram: Engram, splits: Splits) -> HeldOut:
    scratch = runner.scratch()
    scratch.attach(engram)
    found = answers(
        scratch.eval(), splits["val"], runner.name,
        workers=runner.recipe.workers, processes=runner.run.processes,
    )  # fmt: skip
    return HeldOut.joined([(found.logits, found.labels, found.samples)])


def first_fold(splits: Splits) -> Splits:
    """Data with the first fold alone, and its images as validation split."""
    folds = splits.folds
    if folds is None:
        return splits
    one = Folds(1, 1, folds.seed, torch.where(folds.train == 0, 0, NONE))
    return replace(splits, val=splits["val"].subset(folds.samples(0)), folds=one)


def _without_held_out(splits: Splits) -> Splits:
    """The data of tasks that are measured: without the images that the only fold holds out."""
    if splits.folds is None:
        return splits
    learned = splits["train"].subset(splits.folds.samples(NONE))
    return replace(splits, train=learned, folds=None)


def _of_first_fold(held_out: HeldOut, splits: Splits) -> HeldOut:
    """The answers for the images of the first fold, numbered as `first_fold` has them."""
    folds = splits.folds
    if folds is None:
        return held_out
    rows = torch.from_numpy(folds.samples(0))
    own = torch.isin(held_out.samples, rows)
    samples = torch.searchsorted(rows, held_out.samples[own])
    return HeldOut(held_out.outputs[own], held_out.labels[own], samples)


def suggestion(metrics: Mapping[str, Any]) -> str:
    """A sentence that says that `--own-pass` exists, where the answers are far from good; or none.

    On the datasets of `benchmarks/results`, the best task that shares the pass has more than
    `_USUAL` of the answers right with fifty images a class.
    """
    interval = metrics.get("interval")
    if "accuracy" not in metrics or not interval or interval[1] >= _USUAL:
        return ""
    return (
        f"fewer than {_USUAL:.0%} are right, even at the upper end of the interval; "
        f"{flag('own_pass')} tries {', '.join(OWN_PASS)} as well, which take longer, and whose "
        "tasks answer in no pass with others"
    )


_USUAL = 0.8
