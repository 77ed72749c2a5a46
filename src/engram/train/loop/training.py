"""The training loop: trainers that take steps, are validated, checkpointed and finished."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.datasets import Splits
from engram.data.folds import Integers, single_groups
from engram.data.loader import Transform
from engram.data.near_duplicates import known_notice, together_notice
from engram.errors import EngramError, Notice, flag
from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.train.features.feeds import BatchShard, CacheFeed, Feed, FeedPlan, open_feed
from engram.train.loop.bank import PatchFeed
from engram.train.loop.image_statistics import keep_statistics
from engram.train.loop.mixup import Mixup, parts
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.trainable import train_only
from engram.train.loop.validation import Estimator, HeldOut
from engram.train.recipe import Recipe
from engram.train.runs.run import Run
from engram.util.processes import ProcessGroup, Stop, dtype_for, stoppable
from engram.util.tensors import to_device
from engram.util.text import counted

_FEW_BAD = 2  # unreadable images that never stop a run


class Training:
    """Learners that are trained together: where they are, and what a checkpoint keeps of it.

    `prepare`, `begin`, `go` and `end` are called once each, in this order; `whole` calls them.
    """

    feed: Feed | PatchFeed  # set by `prepare`, with `steps` and `every`
    steps: int  # of the whole run
    every: int  # steps between validations
    #: What a checkpoint has of it, beside trainers and losses.
    state: tuple[str, ...] = ("step", "first", "steps", "history", "seen", "unreadable")

    def __init__(
        self,
        model: MemoryViT,
        trainers: Sequence[TaskTrainer],
        splits: Splits,
        recipe: Recipe,
        run: Run,
    ) -> None:
        self.model, self.splits, self.recipe, self.run = model, splits, recipe, run
        self.processes, self.progress, self.callbacks = run.processes, run.progress, run.callbacks
        self._take(trainers)
        self.dtype = torch.float32
        # Where it is
        self.step = 0
        self.per_epoch = recipe.per_epoch(len(splits["train"]))
        self.first = 0  # the step at which these trainers began
        self.history: list[dict[str, float]] = []
        self.unreadable: dict[str, str] = {}
        self.seen, self.loss = 0, math.nan  # of the last batch
        self.copies = 0  # training images that are near-duplicates of another
        self.judged = ""  # how good the best trainer was at the last validation, for people

    def _take(self, trainers: Sequence[TaskTrainer]) -> None:
        """Train these from here on, and no others."""
        self.trainers = trainers
        self.names = [trainer.name for trainer in trainers]
        self.parameters = [p for trainer in trainers for p in trainer.parameters]
        self.losses = torch.zeros(len(trainers), dtype=torch.float64)

    @property
    def finished(self) -> bool:
        return self.step >= self.steps or all(trainer.done for trainer in self.trainers)

    # The run, from beginning to end

    def whole(self, identity: str = "") -> None:
        """Train from beginning to end, and complete all tasks.

        `identity` says what the run is a run of (`identity_of`): it resumes no other.
        """
        self.prepare()
        self.begin(identity)
        self.go()
        self.end()
        self.complete(self.trainers)

    def complete(self, trainers: Sequence[TaskTrainer], rivals: Sequence[HeldOut] = ()) -> None:
        """Estimate how good measured tasks are, calibrate them, keep statistics of their classes.

        Learners of one trial belong together: only the last of them is completed. `rivals` are the
        answers of all that it was chosen from.
        """
        for one in trainers:
            if one.name == one.trial:
                estimator = Estimator(one.task.kind, one.measured_by, self.splits)
                fitted = one.task.head.fitted
                one.metrics = estimator(one.metrics, one.held_out, rivals, fitted)
                one.calibrate()
        keep_statistics(self, trainers)

    def held_out(self, trainer: TaskTrainer, task: str) -> Answers:
        """The answers of a trainer for the validation images, as those of `task`."""
        outputs, labels, samples, _ = trainer.held_out
        chosen, bad = self.splits.held_out, self.unreadable_held_out()
        val = self.splits["val"].subset(chosen)
        places = torch.from_numpy(np.searchsorted(chosen, samples.numpy()))
        fitted = trainer.task.head.fitted
        return Answers(task, val, outputs, labels, places, bad, fitted, trainer.familiarity)

    def unreadable_held_out(self) -> list[str]:
        """Names of the held-out images that could not be read so far."""
        self._refuse_bad()
        val = self.splits["val"]
        names = map(val.sample_name, self.splits.held_out) if self.unreadable else ()
        return [name for name in names if name in self.unreadable]

    def prepare(self, transform: Transform | None = None) -> None:
        """Prepare the first step; the backbone may run over all images, for the cache.

        The model moves to its device and is frozen but for the trainers' parameters, heads take
        what they need from the training labels, and the feed is chosen and made ready.
        """
        self.dtype = dtype_for(self.recipe.precision, self.processes.device)
        self.model.to(self.processes.device).train()
        train_only(self.model, *self.names)
        for trainer in self.trainers:
            trainer.prepare(self.splits["train"].labels)
        specs = [trainer.task.spec for trainer in self.trainers]
        plan = FeedPlan(self.model, specs, self.splits, self.recipe, transform)
        one_class = specs[0].kind_object.one_class
        self.feed = (PatchFeed if one_class else open_feed)(plan, self.processes, self.progress)
        self._keep_together()
        self.steps = self.recipe.steps_for(len(self.splits["train"]))
        self.every = self.recipe.steps_between_evaluations(self.steps, self.per_epoch)

    def _keep_together(self) -> None:
        """Deal the folds again, so that no fold is measured on near-duplicates of what it learned.

        Where all images of every class are near-duplicates, there is no honest way to measure. A
        validation split is left as it is, and only looked at.
        """
        folds, train = self.splits.folds, self.splits["train"]
        if not isinstance(self.feed, (CacheFeed, PatchFeed)) or not self.feed.sees_all:
            return
        if folds is None:
            known = isinstance(self.feed, CacheFeed) and self.feed.known_in_validation()
            notice = known_notice(int(known))
        else:
            groups = self.feed.near_duplicates()
            self.copies = len(groups) - len(np.unique(groups))
            alone = [train.classes[c] for c in single_groups(train, groups)]
            notice = together_notice(groups, alone, folds.keep_together(train, groups))
        if notice and self.processes.main:
            warnings.warn(notice, Notice, stacklevel=2)

    def begin(self, identity: str) -> None:
        """Resume an interrupted run, and try a validation: what is wrong should show now.

        Then the callbacks hear that the run starts.
        """
        self.identity = identity
        self.fed = [self.feed.cache, self.feed.contents]
        state = self.run.begin(identity, self.fed)
        if state is not None:
            self._restore(state)
        self._refuse_bad()
        self.progress("trying the validation images", 0, 0)
        self._validate(batches=2)
        self.callbacks.started(self.step, self.steps)

    def go(self, first: Callable[[], object] = lambda: None) -> None:
        """Take the steps that are left, with validations and checkpoints.

        From when `first` is called, a signal stops it after a checkpoint: Ctrl-C sets `stopped_at`
        of the run where there is an answer to keep, and everything else raises `Interrupted`.
        """
        saved = time.perf_counter()
        with stoppable() as stop:
            first()
            self.progress("training", self.step, self.steps)
            for share in self._shares():
                asked = self._learn(share, stop)
                evaluates = self.step % self.every == 0 or self.step == self.steps
                if evaluates:
                    self._evaluate()
                self._tell(evaluates)
                if asked or time.perf_counter() - saved > self.recipe.checkpoint_seconds:
                    self.checkpoint()
                    if self.run.folder is not None:
                        self.callbacks.checkpointed(self.step)
                    saved = time.perf_counter()
                if asked and not self.finished:
                    keeps = self.can_keep and self.has_answer
                    if not keeps or stop.asked != signal.SIGINT:
                        raise self.run.interruption(self.where)
                    self.run.stopped_at = self.where
                    return

    @property
    def can_keep(self) -> bool:
        """Whether Ctrl-C may write an engram: not from several processes, which end together."""
        return self.run.folder is not None and self.processes.world == 1

    @property
    def has_answer(self) -> bool:
        """Whether there are weights that were validated."""
        return all(trainer.last_step for trainer in self.trainers)

    @property
    def where(self) -> str:
        return f"step {self.step} of {self.steps}"

    def _tell(self, evaluated: bool) -> None:
        """Tell the callbacks; if one of them fails, nothing is lost."""
        try:
            self.callbacks.step(self.step, self.loss)
            if evaluated:
                self.callbacks.evaluated(self.history[-1])
        except EngramError:
            self.checkpoint()
            raise

    def end(self) -> None:
        """Leave every trainer with its final weights, averaged or the best, and measured."""
        self._refuse_bad()
        taken, planned = self.step - self.first, self.steps - self.first
        for trainer in self.trainers:
            trainer.finish(taken, planned, self.per_epoch, bool(self.run.stopped_at))
        self.measure(self.trainers)
        self._show_validation()

    # One step

    def _shares(self) -> Iterator[BatchShard]:
        """This process's share of every batch from here on, epoch after epoch."""
        while not self.finished:
            epoch, position = divmod(self.step, self.per_epoch)
            for share in self.feed.epoch(epoch, position):
                yield share
                if self.finished:
                    return

    def _learn(self, share: BatchShard, stop: Stop) -> bool:
        """One update of every trainer; returns whether some process was asked to stop."""
        trainers, device = self.trainers, self.processes.device
        losses = torch.zeros(len(trainers), device=device)
        scales = to_device(torch.tensor([one.scale for one in trainers]), device)
        mixup, size = self._mixup(share), self.recipe.micro_batch
        for inputs, targets, samples in parts(share, size, mixup, device):
            outputs = self._outputs(inputs, self.names)
            weights = self._fold_weights(samples)
            each = torch.stack(
                [one.loss(outputs[one.name], targets, weights.get(one.fold)) for one in trainers]
            )
            (each * scales).sum().backward()  # type: ignore[no-untyped-call]
            losses += each.detach()
        counts = (len(share.labels), share.failed, stop.asked > 0)
        sums = [*map(float, counts), *losses.tolist()]
        count, failed, asked, *sums = _average_gradients(self.processes, self.parameters, sums)
        self.losses += torch.tensor(sums)
        self.seen += int(count)
        self.loss = sum(sums) / (count * len(trainers)) if count else math.nan
        for trainer in trainers:
            if count:
                trainer.step(self.step - self.first, self.steps - self.first)
            trainer.optimizer.zero_grad()
        self.step += 1
        if failed:
            self._refuse_bad()
        self._show(float(self.losses.mean()) / max(1, self.seen))
        return bool(asked)

    def _fold_weights(self, samples: Tensor) -> dict[int | None, Tensor]:
        """By fold, the weights of images in the loss; without a fold, all count."""
        folds, device = self.splits.folds, self.processes.device
        if folds is None:
            return {}
        numbers = {one.fold for one in self.trainers if one.fold is not None}
        return {fold: to_device(folds.weights(samples, fold), device) for fold in numbers}

    def _show(self, loss: float) -> None:
        self.progress("training", self.step, self.steps, f"loss {loss:.3f}{self.judged}")

    def _mixup(self, share: BatchShard) -> Mixup | None:
        """Depends on the seed, the step and the process alone, so that a resumed run repeats it."""
        if not self.recipe.mixup:
            return None
        seed = [self.recipe.data_seed, self.step, self.processes.rank, self.processes.world]
        return Mixup.drawn(len(share.labels), self.recipe.mixup, seed)

    def _outputs(self, inputs: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        with torch.autocast(self.processes.device.type, self.dtype, self.dtype != torch.float32):
            return self.feed.outputs(inputs, names)

    def features(
        self, shares: Iterable[BatchShard], names: Sequence[str]
    ) -> Iterator[tuple[BatchShard, dict[str, Tensor]]]:
        """Parts of the shares, with the head inputs of tasks for them."""
        for share in shares:
            for part in share.split(self.recipe.micro_batch):
                with torch.no_grad():  # not around the yield, where others need gradients
                    found = self.feed.features(part.inputs, names)
                yield part, found

    # Validation

    def _evaluate(self) -> None:
        """Validate; the losses of the history are those since the last time."""
        self._refuse_divergence()
        self._validate()
        self.history.append(self._line())
        self.losses.zero_()
        self.seen = 0
        self._show_validation()

    def _refuse_divergence(self) -> None:
        diverged = self._diverged()
        if diverged:
            raise EngramError(
                f"The loss is not finite at step {self.step} with a learning rate of "
                f"{diverged[0].lr:g}; use a lower one."
            )

    def _diverged(self) -> list[TaskTrainer]:
        """Learners whose loss, or a weight, is not finite any more."""
        return [
            one
            for one, loss in zip(self.trainers, self.losses, strict=True)
            if not (loss.isfinite() and all(bool(p.isfinite().all()) for p in one.parameters))
        ]

    def _show_validation(self) -> None:
        kind, metric = self.trainers[0].task.kind, self.trainers[0].measured_by
        best = max(trainer.score for trainer in self.trainers)
        self.judged = f", val {kind.metric_title(metric)} {kind.shown(best)}"
        if self.history:
            self._show(self.history[-1]["loss"])

    def _validate(self, batches: int | None = None) -> None:
        """Measure all trainers on the validation images; on a few batches only as a trial."""
        for trainer in self.trainers:
            trainer.swap_average()
        self.measure(self.trainers, batches)
        for trainer in self.trainers:
            if batches is None:
                trainer.record(trainer.metrics, self.step - self.first)
            trainer.swap_average()

    def measure(self, trainers: Sequence[TaskTrainer], batches: int | None = None) -> None:
        """Set answers and metrics of these trainers, which need not be those in training."""
        answers = self._answers(trainers, batches)
        for trainer in trainers:
            held_out = answers[trainer.trial]
            if batches is None:
                trainer.task.kind.fit_buffers(trainer.task.head, held_out.pairs)
            trainer.measure(held_out)

    def _answers(
        self, trainers: Sequence[TaskTrainer], batches: int | None = None
    ) -> dict[str, HeldOut]:
        """Answers for the validation images by trial.

        In cross-validation, those of the task that did not learn from the image.
        """
        self.model.eval()
        asked = self.asked(trainers)
        if batches is not None:
            few = -(-batches * self.recipe.batch // len(asked))
            asked = [(some, samples[:few]) for some, samples in asked]
        kept: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {one.trial: [] for one in trainers}
        failed, seen, images = 0, 0, sum(len(samples) for _, samples in asked)
        for some, samples in asked:
            names = [one.name for one in some]
            for share in self.feed.validation(samples):
                failed += share.failed
                for part in share.split(self.recipe.micro_batch):
                    with torch.no_grad():
                        outputs = self._outputs(part.inputs, names)
                    for one in some:
                        found = one.task.kind.keep(outputs[one.name], part.labels)
                        kept[one.trial].append((*found, part.samples))
                seen += self.processes.world * (len(share.labels) + share.failed)
                if self.step and trainers is self.trainers:
                    note = f"validating {min(seen, images):,} of {images:,}"
                    self.progress("training", self.step, self.steps, note)
        failed = sum(self.processes.gather([failed]))
        if failed:
            self._refuse_bad()
        self.model.train()
        return {one: HeldOut.joined(self.processes.gather(kept[one]), failed) for one in kept}

    def asked(
        self, trainers: Sequence[TaskTrainer]
    ) -> list[tuple[Sequence[TaskTrainer], Integers]]:
        """Validation images by fold, with the trainers that are asked about them."""
        folds = self.splits.folds
        if folds is None:
            return [(trainers, np.arange(len(self.splits["val"])))]
        numbers = sorted({one.fold for one in trainers if one.fold is not None})
        groups = [[one for one in trainers if one.fold == fold] for fold in numbers]
        return [(group, folds.samples(fold)) for group, fold in zip(groups, numbers, strict=True)]

    def _line(self) -> dict[str, float]:
        """One row of the history; of several trainers, the best."""
        best = max(range(len(self.trainers)), key=lambda i: self.trainers[i].score)
        trainer = self.trainers[best]
        metrics, score = trainer.metrics, trainer.measured_by
        return {
            "step": self.step,
            "epoch": round(self.step / self.per_epoch, 3),
            "loss": round(float(self.losses[best] / max(1, self.seen)), 6),
            "lr": self.recipe.rate_at(
                self.step - 1 - self.first, self.steps - self.first, trainer.lr
            ),
            "val_loss": round(metrics.get("loss", math.nan), 6),
            f"val_{score}": metrics[score],
            "best_step": trainer.best_step,
        }

    def _refuse_bad(self) -> None:
        """List what no process could read so far; more than `max_bad` of it is an EngramError."""
        known = len(self.unreadable)
        for shared in self.processes.gather([self.feed.bad]):
            self.unreadable.update(shared)
        images = len(self.splits["train"])
        if self.splits.folds is None:  # else they are training images too
            images += len(self.splits["val"])
        reasons = sorted(self.unreadable.values())
        if len(reasons) > known:
            self.run.list_unreadable(self.unreadable)
        if len(reasons) > max(_FEW_BAD, self.recipe.max_bad * images):
            raise EngramError(
                f"{len(reasons):,} of {counted(images, 'image')} cannot be read, more than "
                f"{flag('max_bad')} ({self.recipe.max_bad:.1%}) allows. The first: "
                f"{reasons[0].rstrip('.')}. Repair or remove them, or raise {flag('max_bad')}."
            )

    # What a checkpoint needs

    def checkpoint(self) -> None:
        if not self.run.writes:
            return
        tensors = {
            f"{i}.{k}": v for i, one in enumerate(self.trainers) for k, v in one.tensors().items()
        }
        own = {"identity": self.identity, "feed": self.fed, "names": self.names}
        trainers = [one.about() for one in self.trainers]
        state = {name: getattr(self, name) for name in self.state}
        self.run.save({**tensors, "losses": self.losses}, {**own, **state, "trainers": trainers})

    def _restore(self, state: Mapping[str, Any]) -> None:
        for name in self.state:
            setattr(self, name, state[name])
        self.losses, tensors = state["tensors"]["losses"], state["tensors"]
        for i, trainer in enumerate(self.trainers):
            own = f"{i}."
            kept = {k.removeprefix(own): v for k, v in tensors.items() if k.startswith(own)}
            trainer.restore(kept, state["trainers"][i])


def _average_gradients(
    processes: ProcessGroup, parameters: Sequence[Tensor], sums: list[float]
) -> list[float]:
    """Turn sums of gradients into means over the whole batch, of all processes together.

    `sums`, the number of images first, are added up over the processes as well.
    """
    if processes.world > 1:
        gradients = [
            (p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters
        ]
        head = torch.tensor(sums, device=gradients[0].device, dtype=gradients[0].dtype)
        total = processes.sum(torch.cat([head, *gradients]))
        sums = total[: len(sums)].tolist()
        pieces = torch.split(total[len(sums) :], [p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()
    for parameter in parameters:
        if parameter.grad is not None and sums[0]:
            parameter.grad /= sums[0]
    return sums
