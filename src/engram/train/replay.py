"""A head for old and new classes, from images of the new ones and statistics of the old.

Features of old images are drawn from the statistics that the old engram kept of them, and the head
is solved by L-BFGS for those and for the new images together, as `solve` does for all real ones.
What gives the features, cells and everything else but the head, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.tasks.class_statistics import ClassStatistics
from engram.tasks.task import Task
from engram.train.choice import best_of
from engram.train.recipe import Recipe
from engram.train.solve import PENALTIES

_EACH, _ALL = 200, 50_000  # features that are drawn of an old class, and of all of them
_ITERATIONS, _ROWS = 60, 8_192


@dataclass(frozen=True, eq=False)
class Images:
    """Features that the head is given of images, their classes, and what each image counts for."""

    features: Tensor  # (images, features), in half precision
    labels: Tensor
    weights: Tensor

    def plus(self, other: Images) -> Images:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Images(*(torch.cat(pair) for pair in pairs))

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        rows = (torch.split(part, _ROWS) for part in vars(self).values())
        return zip(*rows, strict=True)


def real(batches: Iterable[tuple[Tensor, Tensor]]) -> Images:
    """Features of real images: each counts once."""
    features, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return Images(features, labels, torch.ones(len(labels)))


def drawn(old: ClassStatistics, seed: int, each: int = 0) -> Images:
    """Features drawn for old classes, which count for as many images as the classes had.

    `each` is how many of a class are drawn, and by default as many as there is room for.
    """
    known = torch.nonzero(old.counts > 0).flatten().cpu()
    each = each or min(_EACH, max(20, _ALL // max(1, len(known))))
    labels = known.repeat_interleave(each)
    features = old.draw(labels, torch.Generator().manual_seed(seed)).half().cpu()
    return Images(features, labels, old.counts.cpu()[labels] / each)


def solve_head(task: Task, train: Images, val: Images, recipe: Recipe) -> None:
    """Give the head the weights that are best for these images; `val` chooses the penalty.

    Where the recipe balances classes, all count the same.
    """
    if recipe.balance != "none":
        counts = torch.zeros(len(task.spec.classes)).index_add_(0, train.labels, train.weights)
        train = Images(train.features, train.labels, train.weights / counts[train.labels])
    mean, scale = _standard(task, train)
    measured_by = task.kind.score_with(recipe.balance)
    found = (torch.zeros_like(task.head.weight), torch.zeros_like(task.head.bias))
    tried = []
    for penalty in PENALTIES:
        found = _solve(task, train, found, mean, scale, penalty, recipe.label_smoothing)
        weight = found[0] * scale
        tried.append((weight, found[1] - weight @ mean))
    with torch.no_grad():
        seen = _seen(task, val.features)
        answers = [F.linear(seen, *folded).float().cpu() for folded in tried]
        metrics = [task.kind.metrics([(one, val.labels)], {}) for one in answers]
        best = best_of(measured_by, metrics)
        task.head.weight.copy_(tried[best][0])
        task.head.bias.copy_(tried[best][1])


def _seen(task: Task, features: Tensor) -> Tensor:
    """Inputs of the head's last layer."""
    return task.head.hide(features.to(task.head.weight))


def _standard(task: Task, train: Images) -> tuple[Tensor, Tensor]:
    """The mean of what the last layer is given, and what makes its deviations equal."""
    total = torch.zeros(task.head.in_features, dtype=torch.float64)
    squares, count = torch.zeros_like(total), len(train.labels)
    with torch.no_grad():
        for features, _, _ in train.parts():
            x = _seen(task, features).cpu().double()
            total, squares = total + x.sum(0), squares + x.square().sum(0)
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        scale = torch.where(deviation > 1e-5, 1 / deviation, 0.0) * len(mean) ** -0.5
    return mean.to(task.head.weight), scale.to(task.head.weight)


def _solve(
    task: Task,
    train: Images,
    start: tuple[Tensor, Tensor],
    mean: Tensor,
    scale: Tensor,
    penalty: float,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Minimise the mean loss and the penalty, for standardised features, from a start."""
    weight, bias = (part.detach().clone().requires_grad_() for part in start)
    count = float(train.weights.sum())
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        lost = weight.new_zeros(())
        for features, labels, weights in train.parts():
            with torch.no_grad():
                x = (_seen(task, features) - mean) * scale
            outputs, y = F.linear(x, weight, bias), labels.to(weight.device)
            losses = task.kind.losses(outputs, y, task.head, smoothing, None)
            part = (losses * weights.to(losses)).sum() / count
            part.backward()  # type: ignore[no-untyped-call]
            lost = lost + part.detach()
        penalised = penalty / count / 2 * weight.square().sum()
        penalised.backward()  # type: ignore[no-untyped-call]
        return lost + penalised.detach()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
