"""Heads that are solved instead of trained: the regime `readout`, and a plain linear head.

The layer statistics of all images are read once. They are standardised, all but the pooled
token are scaled by one factor alpha, and the loss with an L2 penalty is minimised by L-BFGS, which
takes seconds (`dual_solver.py` where images are few). Validation chooses the penalty,
alpha, how many layers are seen, and whether the grid is. What was found is folded into one
weight and bias for the statistics as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.methods.readout import grid_count, statistics_per_layer
from engram.model import MemoryViT
from engram.tasks.heads import Fitted
from engram.tasks.task import Task
from engram.train.choice import best_of
from engram.train.dual_solver import DualSolver
from engram.train.feeds import BatchShard, Feed
from engram.train.recipe import Recipe
from engram.util.devices import to_device
from engram.util.processes import ProcessGroup
from engram.vit import ViT

PENALTIES = (0.1, 0.01, 0.001)
ALPHAS = (0.1, 0.3, 1.0)
_GRID_SCALE = 0.5  # times alpha: a layer has sixteen grid cells and three statistics
_SEARCH = 4_096  # images on which penalties are tried; the chosen ones are solved with all
_IN_MEMORY = 4e9  # bytes of statistics that are kept; more are read again at every evaluation
_ITERATIONS = 40


class Seen(NamedTuple):
    """Statistics that a head sees: of the last layers (none: the pooled token), and the grid."""

    layers: int
    grid: bool = False


PLAIN = Seen(0)  # a plain linear head


@dataclass(frozen=True, eq=False)
class Solution:
    """A solved head, for statistics as they are."""

    seen: Seen
    alpha: float
    penalty: float
    weight: Tensor  # (classes, features)
    bias: Tensor
    fitted: Fitted
    metrics: dict[str, Any]  # on the validation images

    def put_into(self, task: Task) -> None:
        """Copy the head into a task whose head sees these features."""
        with torch.no_grad():
            task.head.weight.copy_(self.weight)
            task.head.bias.copy_(self.bias)
        for name, value in task.head.fitted.items():
            value.copy_(self.fitted[name])


#: Statistics (b, features) in half precision, or standardised ones in full, with their labels.
Batches = Iterable[tuple[Tensor, Tensor]]


class _Kept:
    """Batches that can be read again and again: from memory, or where they are too many, anew."""

    def __init__(self, read: Callable[[], Iterator[tuple[Tensor, Tensor]]], keep: bool) -> None:
        self._read = read
        self._batches = list(read()) if keep else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._read() if self._batches is None else iter(self._batches)


class Solver:
    """Solves heads for one task from the batches of a feed.

    `task` is a task for this data: it says the kind, and its head settles what that needs. `labels`
    are those of all training images. Where the recipe balances classes, by weights or a sampler,
    the loss has weights: a solver takes no batches, and a sampler has the same mean.
    """

    def __init__(
        self,
        feed: Feed,
        backbone: ViT,
        task: Task,
        team: ProcessGroup,
        recipe: Recipe,
        labels: npt.NDArray[Any],
    ) -> None:
        self.task, self.team, self.smoothing = task, team, recipe.label_smoothing
        self.measured_by = task.kind.score_with(recipe.balance)
        self.weights: Tensor | None = None
        if recipe.balance != "none":
            weights = task.kind.class_weights(labels, len(task.spec.classes))
            self.weights = weights.to(team.device)
        passes = max(1, recipe.views)
        self.width, depth = backbone.config.width, backbone.config.depth
        self.steps, self.grid = depth + 1, grid_count(depth) * self.width
        self.per_layer = statistics_per_layer(backbone.config.class_token) * self.width

        def train() -> Iterator[tuple[Tensor, Tensor]]:
            for epoch in range(passes):
                yield from _statistics(feed, feed.epoch(epoch, 0, balanced=False))

        first = next(iter(train()), None)
        size = 0 if first is None else first[0].numel() * 2 * feed.per_epoch * passes
        self.train = _Kept(train, size <= _IN_MEMORY)
        self.val, self.unreadable = self._validation(feed)
        self._standardise()

    def _validation(self, feed: Feed) -> tuple[Batches, int]:
        """The validation images, and how many of them, in all processes, cannot be read."""
        failed = 0

        def shares() -> Iterator[BatchShard]:
            nonlocal failed
            for share in feed.validation():
                failed += share.failed
                yield share

        batches = list(_statistics(feed, shares()))
        return batches, sum(self.team.gather([failed]))

    def _standardise(self) -> None:
        """Mean and deviation of every statistic over the training images of all processes."""
        features = self.steps * self.per_layer + self.grid
        count, total, squares = 0, torch.zeros(features).double(), torch.zeros(features).double()
        for rows, _ in self.train:
            values = rows.double()
            count += len(values)
            total += values.sum(0)
            squares += values.square().sum(0)
        sums = self.team.sum(torch.cat([torch.tensor([float(count)]).double(), total, squares]))
        self.count = max(1.0, float(sums[0]))
        mean, square = (part / self.count for part in sums[1:].chunk(2))
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        scale = torch.where(deviation > 1e-5, 1 / deviation, 0.0) * self.width**-0.5
        self.mean, self.scale = (part.float().to(self.team.device) for part in (mean, scale))

    @property
    def choices(self) -> tuple[Seen, ...]:
        """What readouts are tried: a third of the layers, all, and all with the grid."""
        return Seen(-(-self.steps // 3)), Seen(self.steps), Seen(self.steps, grid=True)

    def best(self, choices: Sequence[Seen]) -> Solution:
        """The best of all penalties, and of all alphas, for heads that see this."""
        few = self._share()
        tried = [
            (seen, alpha, penalty, found)
            for seen in choices
            for alpha in (ALPHAS if seen.layers else (1.0,))
            for penalty, found in self._path(seen, alpha, few)
        ]
        scores = [self._metrics(self._fold(found, s, a)) for s, a, _, found in tried]
        at = best_of(self.measured_by, scores)
        seen, alpha, penalty, found = tried[at]
        if few is not self.train:
            found = self._solve(found, self._standardised(seen, alpha, self.train), penalty)
        weight, bias = self._fold(found, seen, alpha)
        metrics = self._metrics((weight, bias))
        fitted = {name: value.clone() for name, value in self.task.head.fitted.items()}
        return Solution(seen, alpha, penalty, weight, bias, fitted, metrics)

    def _share(self) -> Batches:
        """At most `_SEARCH` training images, of all processes together."""
        if self.count <= _SEARCH:
            return self.train
        share, taken = [], 0
        for batch in self.train:
            share.append(batch)
            taken += len(batch[1])
            if taken * self.team.world >= _SEARCH:
                break
        return share

    def _path(
        self, what: Seen, alpha: float, batches: Batches
    ) -> Iterator[tuple[float, tuple[Tensor, Tensor]]]:
        """A solution for each penalty, each starting from the one before."""
        features, width = self._standardised(what, alpha, batches), self._features(what)
        here = self.team.world == 1 and self.mean.device.type == "cpu"
        span = None
        if here and 1 < self.count < width:
            seen, labels = (torch.cat(parts) for parts in zip(*features, strict=True))
            span = DualSolver(seen)
            features, width = [(span.coordinates, labels)], len(seen)
        classes = len(self.task.spec.classes)
        found = self.mean.new_zeros(classes, width), self.mean.new_zeros(classes)
        for penalty in PENALTIES:
            found = self._solve(found, features, penalty)
            yield penalty, found if span is None else (span.weight(found[0]), found[1])

    def _standardised(self, what: Seen, alpha: float, batches: Batches) -> Batches:
        """What a head sees, as it is solved: standardised, scaled by alpha."""
        size, scale = self._features(what), self._column_scale(what, alpha)
        mean, device = self.mean[:size], self.mean.device

        def read() -> Iterator[tuple[Tensor, Tensor]]:
            for rows, labels in batches:
                yield (rows[:, :size].to(mean) - mean) * scale, to_device(labels, device)

        return _Kept(read, keep=False)

    def _features(self, what: Seen) -> int:
        return what.layers * self.per_layer + what.grid * self.grid or self.width

    def _column_scale(self, what: Seen, alpha: float) -> Tensor:
        """What standardises each number, with alpha for all but the pooled token."""
        scale: Tensor = self.scale[: self._features(what)].clone()
        scale[self.width :] *= alpha
        scale[self.steps * self.per_layer :] *= _GRID_SCALE
        return scale

    def _solve(
        self, start: tuple[Tensor, Tensor], features: Batches, penalty: float
    ) -> tuple[Tensor, Tensor]:
        """Minimise the mean loss and the penalty, from a start."""
        weight, bias = (part.clone().requires_grad_() for part in start)
        head, kind, smoothing = self.task.head, self.task.kind, self.smoothing
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=_ITERATIONS, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            for part in (weight, bias):
                part.grad = torch.zeros_like(part)
            lost, count = bias.new_zeros(()), 0
            for seen, labels in features:
                outputs = head.finish(F.linear(seen, weight, bias))
                loss = kind.losses(outputs, labels, head, smoothing, self.weights).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                lost, count = lost + loss.detach(), count + len(labels)
            lost, count = self._averaged([weight, bias], lost, count)
            with torch.no_grad():
                assert weight.grad is not None
                weight.grad += penalty / count * weight
                lost += penalty / count / 2 * weight.square().sum()
            return lost

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return weight.detach(), bias.detach()

    def _averaged(
        self, parameters: Sequence[Tensor], lost: Tensor, count: int
    ) -> tuple[Tensor, int]:
        """Turn sums over this process's images into means over those of all processes."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = torch.stack([lost, lost.new_tensor(float(count))])
        sums = self.team.sum(torch.cat([own, *(gradient.flatten() for gradient in gradients)]))
        images = float(sums[1])
        pieces = torch.split(sums[2:] / images, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        return sums[0] / images, int(images)

    def _fold(
        self, found: tuple[Tensor, Tensor], what: Seen, alpha: float
    ) -> tuple[Tensor, Tensor]:
        """The same head for statistics that are not standardised."""
        weight = found[0] * self._column_scale(what, alpha)
        return weight, found[1] - weight @ self.mean[: weight.shape[1]]

    def _metrics(self, head: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """How good a folded head is on the validation images of all processes."""
        weight, bias = head
        kind, own = self.task.kind, self.task.head
        kept = []
        for rows, labels in self.val:
            outputs = own.finish(F.linear(rows[:, : weight.shape[1]].to(weight), weight, bias))
            kept.append(kind.keep(outputs, labels))
        kept = self.team.gather(kept)
        kind.fit_buffers(own, kept)
        return kind.metrics(kept, own.fitted, self.unreadable)


def solve_task(
    model: MemoryViT,
    name: str,
    feed: Feed,
    team: ProcessGroup,
    recipe: Recipe,
    labels: npt.NDArray[Any],
) -> None:
    """Solve a `readout` task of the model, which then sees what validation chose."""
    task = model.task(name)
    solver = Solver(feed, model.backbone, task, team, recipe, labels)
    solution = solver.best(solver.choices)
    method = replace(task.method, **solution.seen._asdict())
    if method != task.method:
        task = model.swap(replace(task.spec, method=method))
    solution.put_into(task)


def _statistics(feed: Feed, shares: Iterable[BatchShard]) -> Iterator[tuple[Tensor, Tensor]]:
    for share in shares:
        if len(share.labels):
            with torch.no_grad():  # not around the yield, where others need gradients
                rows = feed.layer_statistics(share.inputs)
            yield rows.cpu().half(), share.labels
