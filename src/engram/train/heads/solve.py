"""Heads that are solved instead of trained: the regime `readout`, and a plain linear head.

The layer statistics of all images are read once. They are standardised, all but the pooled
token are scaled by one factor alpha, and the loss with an L2 penalty is minimised by L-BFGS, which
takes seconds (`dual_solver.py` where images are few). Held-out images choose the penalty, alpha,
how many layers are read, and whether the grid is. What was found is folded into one weight and bias
for the statistics as they are, and factorised (`methods/readout.py`): a projection of the
statistics onto the principal components of what they add to the outputs, in half precision, and a
small head on the result. Its rank is full where that is small, else the lowest that loses nothing
on the held-out images.

In cross-validation the heads of all folds are solved together: they are rows of one product, and
each has its own weights of the images in its loss. The head for all images, which chooses nothing,
joins them once the settings are chosen. Axes: f folds, the
last of them for all images (or one alone, where there are no folds), c classes, d features, b
images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.data.datasets import Splits
from engram.tasks.heads import Fitted
from engram.tasks.task import Task
from engram.train.features.feeds import BatchShard
from engram.train.heads.columns import Columns, Reads
from engram.train.heads.dual_solver import DualSolver, Products
from engram.train.loop.validation import HeldOut, best_of, noise
from engram.train.recipe import Recipe
from engram.util.processes import ProcessGroup
from engram.util.tensors import to_device

if TYPE_CHECKING:
    from engram.train.loop.training import Training

#: Values between these change nothing: 0.1 points at most in 123 runs with 2 to 50 images a class.
PENALTIES = (0.1, 0.001)
#: Of a head that stays near its start, such as words: the first one hardly leaves it.
START_PENALTIES = (1000.0, 10.0, 1.0, 0.1, 0.01)
ALPHAS = (0.1, 0.3, 1.0)
_WORSE = 4.0  # times the margin of a tie: from there on no larger alpha is tried
_SEARCH = 4_096  # images on which penalties are tried; the chosen ones are solved with all
_IN_MEMORY = 4e9  # bytes of statistics that are kept; more are read again at every evaluation
_ITERATIONS, _ROWS = 40, 2_048
#: Ranks that are tried for the head on everything but the pooled token; the last is full, which is
#: taken at once where the projection has no more numbers than this, times the width.
RANKS = (30, 60, 120)
_SMALL = 3_000
_LOSS = 0.002  # of the score, that a lower rank may cost
MOST_CLASSES = 2_048  # from there on the components would take gigabytes


class SolverSetting(NamedTuple):
    """One setting of a solved head, and its answers for the held-out images."""

    reads: Reads
    alpha: float
    penalty: float
    answers: HeldOut
    metrics: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Solution:
    """Solved heads, for statistics as they are, or projected."""

    reads: Reads
    weight: Tensor  # (f, c, d)
    bias: Tensor  # (f, c)
    tensors: Mapping[str, Tensor]  # other parameters of the tasks, by name: (f, …) each
    fitted: Fitted
    metrics: dict[str, Any]  # of the answers for the held-out images
    answers: HeldOut
    tried: Sequence[SolverSetting]  # all that it was chosen from

    def put_into(self, task: Task, fold: int = -1) -> None:
        """Copy a head into a task that reads these features: the last, or that of a fold."""
        with torch.no_grad():
            task.head.weight.copy_(self.weight[fold])
            task.head.bias.copy_(self.bias[fold])
            for name, values in self.tensors.items():
                task.get_parameter(name).copy_(values[fold])
        for name, value in task.head.fitted.items():
            value.copy_(self.fitted[name])


class Rows(NamedTuple):
    """Features of some images: as they are, in half precision, or standardised, in full."""

    x: Tensor  # (b, d)
    labels: Tensor
    samples: Tensor
    weights: Tensor | None = None  # of the images in the losses of the heads: (f, b)

    @classmethod
    def joined(cls, batches: Iterable[Rows]) -> Rows:
        """One batch of several that have no weights yet."""
        parts = zip(*(one[:3] for one in batches), strict=True)
        return cls(*(torch.cat(part) for part in parts))


class _Kept:
    """Batches that can be read again and again: from memory, or where they are too many, anew."""

    def __init__(self, read: Callable[[], Iterator[Rows]], keep: bool) -> None:
        self._read = read
        self._batches = list(read()) if keep else None

    def __iter__(self) -> Iterator[Rows]:
        return self._read() if self._batches is None else iter(self._batches)


@dataclass(frozen=True, eq=False)
class Images:
    """Features of the images that heads are solved from, and of those that choose."""

    columns: Columns
    train: Iterable[Rows]  # which is read again and again
    val: Iterable[Rows] | None = None  # None: training images, which the folds hold out

    @classmethod
    def read(cls, training: Training, name: str) -> Images:
        """Read the head inputs of a task; training images are kept where they fit into memory."""
        feed, splits, views = training.feed, training.splits, max(1, training.recipe.views)

        def read(shares: Iterable[BatchShard]) -> Iterator[Rows]:
            for share, found in training.features(shares, [name]):
                yield Rows(found[name].cpu().half(), share.labels, share.samples)

        def train() -> Iterator[Rows]:
            for epoch in range(views):
                yield from read(feed.epoch(epoch, 0, balanced=False))

        columns = Columns.for_task(training.model.task(name), training.model.backbone)
        size = 2 * columns.all * len(splits["train"]) * views
        kept = _Kept(train, size <= _IN_MEMORY)
        in_turn = splits.folds is not None and feed.plain  # training images as they are
        return cls(columns, kept, None if in_turn else list(read(feed.validation())))


class Solver:
    """Solves heads for a task from features of images, as `Columns` has them.

    The task says the kind, and its head settles what that needs. Where the recipe balances classes,
    by weights or a sampler, the loss has weights: a solver takes no batches, and a sampler has the
    same mean.
    """

    unreadable = 0  # held-out images

    def __init__(
        self, task: Task, images: Images, splits: Splits, recipe: Recipe, processes: ProcessGroup
    ) -> None:
        self.task, self.images, self.processes = task, images, processes
        self.columns, self.smoothing = images.columns, recipe.label_smoothing
        self.folds, labels = splits.folds, splits["train"].labels
        #: Heads that held-out images can measure: those of the folds. With the one for all: f.
        self.measured_heads = 1 if self.folds is None else self.folds.count
        self.heads = self.measured_heads + (self.folds is not None)
        self.measured_by = task.kind.score_with(recipe.balance)
        task.kind.prepare(task.head, labels)
        self.weights: Tensor | None = None
        if recipe.balance != "none":
            weights = task.kind.class_weights(labels, len(task.spec.classes))
            self.weights = weights.to(processes.device)
        self._known: tuple[Iterable[Rows], tuple[Products, Rows]] | None = None
        self._standardise()
        self.start = self._standardised_start()
        self.penalties = START_PENALTIES if task.method.keeps_start else PENALTIES

    @classmethod
    def of(cls, training: Training, name: str) -> Solver:
        """A solver for a task of a training, from its images."""
        task, images = training.model.task(name), Images.read(training, name)
        solver = cls(task, images, training.splits, training.recipe, training.processes)
        solver.unreadable = len(training.unreadable_held_out())
        return solver

    def _standardise(self) -> None:
        """Mean and deviation of every statistic over the training images of all processes."""
        sums = torch.zeros(1 + 2 * self.columns.all).double()  # images, sums, sums of squares
        for batch in self.images.train:
            x = batch.x.double()
            count = torch.tensor([float(len(x))]).double()
            sums += torch.cat([count, x.sum(0), x.square().sum(0)])
        sums = self.processes.sum(sums)
        self.count = max(1.0, float(sums[0]))
        mean, square = (part / self.count for part in sums[1:].chunk(2))
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        scale = torch.where(deviation > 1e-5, 1 / deviation, 0.0) * self.columns.width**-0.5
        self.mean, self.scale = (part.float().to(self.processes.device) for part in (mean, scale))

    def _standardised_start(self) -> tuple[Tensor, Tensor]:
        """The head that penalties pull towards, for standardised features: zero, or the task's."""
        classes = len(self.task.spec.classes)
        if not self.task.method.keeps_start:
            return self.mean.new_zeros(classes, 1), self.mean.new_zeros(classes)
        weight, bias = (part.detach().to(self.mean) for part in self.task.head.parameters())
        return weight * torch.where(self.scale > 0, 1 / self.scale, 0.0), bias + weight @ self.mean

    def best(self, choices: Sequence[Reads]) -> Solution:
        """Solve with all penalties and alphas for heads that see this, and keep the best."""
        few = self._share()
        tried = [one for reads in choices for one in self._alphas(reads, few)]
        best = best_of(self.measured_by, [one.metrics for one in tried])
        reads, alpha, penalty, answers, metrics = tried[best]
        penalties = self.penalties[: self.penalties.index(penalty) + 1]
        *_, found = self._path(reads, alpha, self.images.train, penalties, self.heads)
        if few is not self.images.train or self.heads > self.measured_heads:
            answers, metrics = self._measure(found)
        weight, bias = self._fold(found)
        tried[best] = tried[best]._replace(answers=answers, metrics=metrics)
        if reads is not None and weight.shape[1] <= MOST_CLASSES:
            solution = self._factorised(tried, best, weight, bias)
        else:
            solution = Solution(reads, weight, bias, {}, {}, metrics, answers, tried)
        self.task.kind.fit_buffers(self.task.head, solution.answers.pairs)
        fitted = {name: value.clone() for name, value in self.task.head.fitted.items()}
        return replace(solution, fitted=fitted)

    def _factorised(
        self, tried: list[SolverSetting], best: int, weight: Tensor, bias: Tensor
    ) -> Solution:
        """Heads on the pooled token and a projection of the rest, from heads on all as it is.

        Of full rank where that is small; else of the lowest rank in `RANKS` whose score is not
        below theirs.
        """
        score, classes = float(tried[best].metrics[self.measured_by]), weight.shape[1]
        width = self.columns.width
        pooled, others = weight[..., :width], weight[..., width:]
        mean, components = self._components(others)
        small = classes * others.shape[-1] <= _SMALL * width
        for rank in (*(rank for rank in RANKS if rank < classes and not small), classes):
            kept = components[..., :rank]  # (f, c, r)
            projection = kept.mT @ others
            size = projection.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)
            projection = (projection / size).half().float()  # at most 1: within its range
            left_out = mean - (kept @ (kept.mT @ mean.unsqueeze(-1))).squeeze(-1)
            kept = kept * size
            whole = torch.cat([pooled, kept @ projection], -1)
            answers, metrics = self._measure_folded(whole, bias + left_out)
            if float(metrics[self.measured_by]) >= score - _LOSS:
                break
        before = tried[best].reads
        assert before is not None
        reads = replace(before, projected=rank)
        tried[best] = tried[best]._replace(reads=reads, answers=answers, metrics=metrics)
        head = torch.cat([pooled, kept], -1), bias + left_out
        return Solution(reads, *head, {"projection": projection}, {}, metrics, answers, tried)

    def _components(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (f, c) and principal components (f, c, c) of what statistics add to the outputs.

        `weight` (f, c, d) is that of all but the pooled token. Every head has the images that it
        learned from.
        """
        heads, classes, size = weight.shape
        width = self.columns.width
        sums = torch.zeros(heads, classes + 1, classes + 1, dtype=torch.float64)
        for batch in self.images.train:
            x = batch.x[:, width : width + size].to(weight)
            added = F.linear(x, weight.flatten(0, 1)).view(-1, heads, classes).movedim(1, 0)
            added = F.pad(added, (0, 1), value=1.0).double().cpu()  # with a column that counts
            counts = self._counted(batch.samples).cpu()
            sums += (added * counts.unsqueeze(-1)).mT @ added
        sums = self.processes.sum(sums).cpu()
        moments = sums / sums[:, -1:, -1:].clamp(min=1)
        mean = moments[:, :-1, -1]
        covariance = moments[:, :-1, :-1] - mean.unsqueeze(2) * mean.unsqueeze(1)
        components = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
        return mean.to(weight), components.to(weight)

    def _alphas(self, reads: Reads, batches: Iterable[Rows]) -> list[SolverSetting]:
        """All penalties and alphas, until a larger alpha is clearly worse."""
        tried: list[SolverSetting] = []
        for alpha in (1.0,) if reads is None else ALPHAS:
            scores = [float(one.metrics[self.measured_by]) for one in tried]
            now = []
            for found in self._path(reads, alpha, batches, self.penalties, self.measured_heads):
                answers, metrics = self._measure(found)
                tried.append(SolverSetting(reads, alpha, found.penalty, answers, metrics))
                now.append(float(metrics[self.measured_by]))
            if scores:
                best = tried[scores.index(max(scores))].metrics
                if max(now) < max(scores) - _WORSE * noise(self.measured_by, best):
                    break
        return tried

    def _share(self) -> Iterable[Rows]:
        """At most `_SEARCH` training images, of all processes together."""
        if self.count <= _SEARCH:
            return self.images.train
        share, taken = [], 0
        for batch in self.images.train:
            share.append(batch)
            taken += len(batch.labels)
            if taken * self.processes.world >= _SEARCH:
                break
        return share

    def _path(
        self,
        reads: Reads,
        alpha: float,
        batches: Iterable[Rows],
        penalties: Sequence[float],
        heads: int,
    ) -> Iterator[_Found]:
        """A solution of the first heads for each penalty, each starting from the one before."""
        width, dual = self.columns.count(reads), None
        here = self.processes.world == 1 and self.mean.device.type == "cpu"
        if here and 1 < self.count < width and not self.task.method.keeps_start:
            products, whole = self._products(batches)
            dual = products.solver(self.columns.blocks(reads, alpha))
            features: Iterable[Rows] = [self._weighted(whole._replace(x=dual.coordinates))]
            width = len(whole.samples)
        else:
            features = self._standardised(reads, alpha, batches)
        start, bias = self.start
        weight = start.expand(heads, -1, width)
        bias = bias.expand(heads, -1)
        for penalty in penalties:
            weight, bias = self._solve(weight, bias, features, penalty)
            yield _Found(reads, alpha, penalty, weight, bias, features, dual)

    def _standardised(self, reads: Reads, alpha: float, batches: Iterable[Rows]) -> _Kept:
        """Features as a head is solved for: standardised, scaled by alpha."""
        size, scale = self.columns.count(reads), self._column_scale(reads, alpha)
        mean, device = self.mean[:size], self.mean.device

        def standardised() -> Iterator[Rows]:
            for rows, labels, samples, _ in batches:
                x = (rows[:, :size].to(mean) - mean) * scale
                yield Rows(x, to_device(labels, device), samples)

        def read() -> Iterator[Rows]:
            return map(self._weighted, _larger(standardised()))

        return _Kept(read, keep=4 * size * self.count <= _IN_MEMORY / 4)

    def _products(self, batches: Iterable[Rows]) -> tuple[Products, Rows]:
        """Products of the images, and all of them in a batch; kept for the next setting."""
        if self._known is None or self._known[0] is not batches:
            whole = Rows.joined(batches)
            x = (whole.x.to(self.mean) - self.mean) * self.scale
            self._known = batches, (Products(x), whole)
        return self._known[1]

    def _column_scale(self, reads: Reads, alpha: float) -> Tensor:
        """Factor of every feature: one over its deviation, times alpha but for the pooled token."""
        blocks = self.columns.blocks(reads, alpha)
        return torch.cat([self.scale[a:b] * by for a, b, by in blocks])

    def _solve(
        self, weight: Tensor, bias: Tensor, features: Iterable[Rows], penalty: float
    ) -> tuple[Tensor, Tensor]:
        """Minimise the mean loss and the penalty of every head, from a start."""
        weight, bias = (part.clone().requires_grad_() for part in (weight, bias))
        head, kind, smoothing = self.task.head, self.task.kind, self.smoothing
        optimizer = torch.optim.LBFGS(
            [weight, bias], max_iter=_ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            for part in (weight, bias):
                part.grad = torch.zeros_like(part)
            lost, count = bias.new_zeros(()), 0
            for x, labels, _, weights in features:
                outputs = head.finish(_linear(x, weight, bias))  # (f, b, c)
                same = labels.repeat(len(bias), *[1] * (labels.ndim - 1))
                losses = kind.losses(
                    outputs.flatten(0, 1), same, head, smoothing, self.weights
                ).view(len(bias), -1)
                assert weights is not None
                loss = (losses * weights[: len(bias)]).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                lost, count = lost + loss.detach(), count + len(labels)
            lost, count = self._averaged([weight, bias], lost, count)
            with torch.no_grad():
                assert weight.grad is not None
                penalties = penalty / count * self._penalised()[: len(bias)]
                change = weight - self.start[0]
                weight.grad += penalties * change
                lost += (penalties * change.square()).sum() / 2
            return lost

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return weight.detach(), bias.detach()

    def _weighted(self, batch: Rows) -> Rows:
        return batch._replace(weights=self._counted(batch.samples))

    def _counted(self, samples: Tensor) -> Tensor:
        """Weights of images in the losses of the heads: (f, b)."""
        rows = [torch.ones(len(samples))]
        if self.folds is not None:
            rows = [self.folds.weights(samples, k) for k in range(self.folds.count)] + rows
        return torch.stack(rows).float().to(self.processes.device)

    def _penalised(self) -> Tensor:
        """Penalties are for sums over images; a fold's mean is over fewer: (f, 1, 1)."""
        if self.folds is None:
            return self.mean.new_ones(1, 1, 1)
        kept = [(self.folds.train != fold).double().mean() for fold in range(self.folds.count)]
        return (1 / torch.tensor([*kept, 1.0])).to(self.mean).view(-1, 1, 1)

    def _averaged(
        self, parameters: Sequence[Tensor], lost: Tensor, count: int
    ) -> tuple[Tensor, int]:
        """Turn sums over this process's images into means over those of all processes."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = torch.stack([lost, lost.new_tensor(float(count))])
        sums = self.processes.sum(torch.cat([own, *(gradient.flatten() for gradient in gradients)]))
        images = float(sums[1])
        pieces = torch.split(sums[2:] / images, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        return sums[0] / images, int(images)

    def _fold(self, found: _Found) -> tuple[Tensor, Tensor]:
        """Fold the standardisation into weight and bias."""
        weight = found.weight if found.dual is None else found.dual.weight(found.weight)
        weight = weight * self._column_scale(found.reads, found.alpha)
        return weight, found.bias - weight @ self.mean[: weight.shape[-1]]

    def _measure(self, found: _Found) -> tuple[HeldOut, dict[str, Any]]:
        """Answers of the heads for the images that they did not learn from, and their metrics."""
        if self.images.val is None:
            return self._answers(found.weight, found.bias, found.features)
        return self._measure_folded(*self._fold(found))

    def _measure_folded(self, weight: Tensor, bias: Tensor) -> tuple[HeldOut, dict[str, Any]]:
        """`_measure` of heads for the statistics as they are."""
        size, held_out = weight.shape[-1], self.images.val
        held_out = self.images.train if held_out is None else held_out
        batches = (one._replace(x=one.x[:, :size].to(weight)) for one in held_out)
        return self._answers(weight, bias, batches)

    def _answers(
        self, weight: Tensor, bias: Tensor, batches: Iterable[Rows]
    ) -> tuple[HeldOut, dict[str, Any]]:
        kind, own, folds = self.task.kind, self.task.head, self.folds
        kept = []
        for x, labels, samples, _ in batches:
            linear = _linear(x, weight, bias)
            head = torch.zeros_like(samples)
            if folds is not None:
                head = folds.train[samples]
            rows = (head >= 0).nonzero()[:, 0]
            outputs = own.finish(linear[head[rows], rows])
            kept.append((*kind.keep(outputs, labels.cpu()[rows]), samples[rows]))
        answers = HeldOut.joined(self.processes.gather(kept), self.unreadable)
        kind.fit_buffers(own, answers.pairs)
        return answers, kind.metrics(answers.pairs, own.fitted, answers.failed)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Outputs (f, b, c) of heads that see the same features (b, d)."""
    linear = F.linear(x, weight.flatten(0, 1), bias.flatten())
    return linear.view(-1, *bias.shape).movedim(1, 0)


class _Found(NamedTuple):
    """Heads as they were solved: for standardised features, or in coordinates of the images."""

    reads: Reads
    alpha: float
    penalty: float
    weight: Tensor  # (f, c, d)
    bias: Tensor
    features: Iterable[Rows]
    dual: DualSolver | None


def _larger(batches: Iterable[Rows]) -> Iterator[Rows]:
    """Fewer, larger batches, which take less time."""
    waiting: list[Rows] = []
    for batch in batches:
        waiting.append(batch)
        if sum(len(one.labels) for one in waiting) >= _ROWS:
            yield Rows.joined(waiting)
            waiting = []
    if waiting:
        yield Rows.joined(waiting)
