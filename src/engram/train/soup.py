"""A soup: the average of the best variants of a sweep, kept where validation says that it helps.

Only variants that began with the same weights are averaged: they have the same seed and number of
cells, and differ in learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engram.errors import EngramError, flag
from engram.store.merging import average, normalise_weights
from engram.tasks.kind import Kind
from engram.train.choice import best_of
from engram.train.variants import Measure, Trained, Variant


@dataclass(frozen=True)
class Soup:
    """The averages that were tried: of the best variant alone, of the best two, and so on."""

    values: list[float]  # of the metric that chooses, on validation
    losses: list[float]
    kept: int  # how many variants the engram is the average of; 1: the best alone
    members: list[dict[str, Any]]  # all that were averaged, the best first
    metric: str = "accuracy"

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """Record in the engram of the variants that it is the average of."""
        return [{**one, "weight": round(1 / self.kept, 6)} for one in self.members[: self.kept]]

    def to_dict(self) -> dict[str, Any]:
        tried = [
            {"variants": i + 1, f"val_{self.metric}": value, "val_loss": loss}
            for i, (value, loss) in enumerate(zip(self.values, self.losses, strict=True))
        ]
        return {"kept": self.kept, "tried": tried, "members": self.members}

    def summary(self, kind: Kind) -> str:
        """For people: what was tried, and what was kept."""
        tried = [
            f"{'the best alone' if not i else f'average of {i + 1}'} {kind.shown(value)} "
            f"(loss {loss:.3f})"
            for i, (value, loss) in enumerate(zip(self.values, self.losses, strict=True))
        ]
        kept = f"the average of {self.kept}" if self.kept > 1 else "the best alone"
        return f"{', '.join(tried)}; kept {kept}"


def spread(lr: float, count: int) -> list[float]:
    """Learning rates around one, from half of it to twice as much."""
    return [float(f"{lr * 2 ** (2 * i / (count - 1) - 1):.3g}") for i in range(count)]


def check_soup(count: int, variants: Sequence[Variant], refit: bool) -> None:
    """Refuse a soup of so many variants where a sweep has none; 0: no soup was asked for."""
    if not count:
        return
    if count < 2:
        raise EngramError(f"{flag('soup')} is {count}; an average needs at least 2 variants.")
    if refit:
        raise EngramError(
            f"{flag('refit')} trains one variant again, and {flag('soup')} averages several; "
            "leave one of them out."
        )
    alike = [one for one in variants if _start(one) == _start(variants[0])]
    if len(alike) < count:
        raise EngramError(
            f"{flag('soup')} is {count}, but only {len(alike)} of the {len(variants)} variants "
            "begin with the same weights (the same seed and number of cells); give more learning "
            f"rates or weight decays ({flag('lr')} 0.0005,0.001,0.002)."
        )


def best_soup(
    trained: Sequence[Trained], best: Trained, count: int, measure: Measure
) -> tuple[Soup, Trained]:
    """Try averages, and keep the best by `choice.best_of`: one variant, or an average.

    The averages are of the best two, three, … up to `count` variants, all with the same weight.
    """
    alike = [one for one in trained if _start(one.variant) == _start(best.variant)]
    alike.sort(key=lambda one: (one is not best, -one.score, one.metrics.get("loss", 0.0)))
    different: dict[str, Trained] = {}
    for one in alike:
        different.setdefault(one.engram.content, one)
    members = list(different.values())[:count]
    found = [(f"variant {i + 1}", one.engram) for i, one in enumerate(members)]
    groups = [found[: i + 1] for i in range(1, len(found))]
    averages = [average(group, normalise_weights((), len(group))) for group in groups]
    tried = [best, *measure([replace(best, engram=one) for one in averages])]
    at = best_of(best.measured_by, [one.metrics for one in tried])
    soup = Soup(
        values=[one.score for one in tried],
        losses=[float(one.metrics.get("loss", 0.0)) for one in tried],
        kept=at + 1,
        members=[
            {
                "task": one.engram.spec.name,
                "content": one.engram.content,
                "lr": one.variant.setting.lr,
                "weight_decay": one.variant.setting.weight_decay,
                "seed": one.variant.seed,
            }
            for one in members
        ],
        metric=best.measured_by,
    )
    return soup, tried[at]


def _start(variant: Variant) -> tuple[int, int]:
    """Settings that decide the weights that a variant begins with."""
    return variant.setting.cells, variant.seed
