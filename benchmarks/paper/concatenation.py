"""Section 4.4: what other tasks' cells do to the first task, without a mask and with it.

    python benchmarks/paper/concatenation.py

Attaches engrams of the regime `memory` (5 cells, from table2.py) to one trunk so that every token
reads the cells of all of them, and measures the first task as others are added; beside it the
same with engrams of the regime `masked`, all in one pass. Two minutes, once the engrams are there.
Expect fashion to fall from 83.4 to 66.3 and 57.5 without the mask, and pets from 73.5 to 71.2 and
67.0; with it, no answer changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sets
import torch
from cached import BATCH
from cached import EPOCHS as CACHED_EPOCHS
from runs import RECORDS, SEEDS, Setting, engram_path, read, write

from engram.data.datasets import Dataset
from engram.data.loader import Loader
from engram.images.preprocessing import normalise
from engram.inference.evaluate import preprocessing_of
from engram.model import MemoryViT
from engram.store.format import read_engram

ORDER = {
    "fashion": ("fashion", "pets", "flowers"),
    "pets": ("pets", "flowers", "fashion"),
}
PIXELS = 112


def setting(name: str, regime: str) -> Setting:
    if regime == "memory":
        return Setting(name, "memory")
    return Setting(name, "masked", epochs=CACHED_EPOCHS, batch=BATCH)


def engram(name: str, regime: str) -> Any:
    """The engram of the first seed that was trained, or None."""
    paths = [engram_path(setting(name, regime), seed) for seed in SEEDS]
    found = [path for path in paths if path.exists()]
    return read_engram(found[0]).renamed(name) if found else None


@dataclass(frozen=True)
class Concatenation:
    """The first task of one regime, with the others attached one after another."""

    first: str
    regime: str

    @property
    def name(self) -> str:
        return f"concatenation {self.first} {self.regime}"

    @property
    def path(self) -> Any:
        return RECORDS / "concatenation" / f"{self.first}-{self.regime}.json"

    def missing(self) -> list[str]:
        return [] if self.path.exists() else [self.name]

    def ready(self) -> bool:
        return all(engram(name, self.regime) is not None for name in ORDER[self.first])

    def work(self, say: Callable[[str], object]) -> None:
        began = time.perf_counter()
        model = MemoryViT(sets.trunk(PIXELS), unmasked=self.regime == "memory")
        data = sets.splits(self.first, PIXELS, 1_000)
        steps: list[dict[str, Any]] = []
        alone = torch.zeros(0)
        for name in ORDER[self.first]:
            model.attach(engram(name, self.regime))
            logits, labels = answers(model, data["test"], self.first)
            alone = alone if len(alone) else logits
            moved = float((logits - alone).abs().max())
            right = float((logits.argmax(1) == labels).float().mean())
            steps.append({"added": name, "test": right, "largest_change_of_a_logit": moved})
            say(f"+ {name}: {right:.4f}")
        seconds = round(time.perf_counter() - began, 1)
        record = {"first": self.first, "regime": self.regime, "steps": steps, "seconds": seconds}
        write(self.path, record)


@torch.inference_mode()
def answers(model: MemoryViT, data: Dataset, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one task and the labels, with every attached task in the pass."""
    preprocessing = preprocessing_of(model)
    logits, labels = [], []
    for batch in Loader(data, preprocessing, 64):
        answered = model.eval()(normalise(batch.images, preprocessing), tasks=list(model.tasks))
        logits.append(answered[name])
        labels.append(batch.labels)
    return torch.cat(logits), torch.cat(labels)


def jobs() -> list[Concatenation]:
    return [Concatenation(first, regime) for first in ORDER for regime in ("memory", "masked")]


def table() -> list[str]:
    lines = ["| first task | attention | alone | and one more | and two |", "|---|---|---|---|---|"]
    for job in jobs():
        record = read(job.path)
        if record is None:
            lines.append(f"| {job.first} | {job.regime} | not run | | |")
            continue
        cells = [
            f"{100 * step['test']:.1f}" + ("" if i == 0 else f" (+ {step['added']})")
            for i, step in enumerate(record["steps"])
        ]
        lines.append(f"| {job.first} | {job.regime} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    from run import script

    script(jobs(), table)
