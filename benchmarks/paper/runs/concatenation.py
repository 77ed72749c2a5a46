"""Section 4.4: what the cells of other tasks do to the first task, with and without the mask.

Attaches engrams of the regime `memory` (5 cells, from table 2) to one backbone, so that every token
reads the cells of all of them, and measures the first task as others are added. Then the same with
engrams of the regime `masked`. Two minutes, once the engrams exist. Expect fashion to fall from
83.4 to 66.3 and 57.5 without the mask, and pets from 73.5 to 71.2 and 67.0; with it, no answer
changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.paper.records import CONCATENATION
from benchmarks.paper.runs import datasets
from benchmarks.paper.runs.from_cache import cached_setting
from benchmarks.paper.runs.settings import SEEDS, Setting, engram_path
from benchmarks.report import markdown_table
from engram.data.datasets import Dataset
from engram.data.loader import Loader
from engram.images.preprocessing import normalise
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.store.format import read_engram

ORDER = {
    "fashion": ("fashion", "pets", "flowers"),
    "pets": ("pets", "flowers", "fashion"),
}
PIXELS = 112


def trained_engram(dataset: str, regime: str) -> Engram | None:
    """The engram of the first seed that was trained, or None."""
    plain = Setting(dataset, "memory")
    setting = plain if regime == "memory" else cached_setting(dataset, regime="masked")
    for seed in SEEDS:
        if engram_path(setting, seed).exists():
            return read_engram(engram_path(setting, seed)).renamed(dataset)
    return None


@dataclass(frozen=True)
class Concatenation:
    """The first task of one regime, with the others attached one after another."""

    first: str
    regime: str

    @property
    def name(self) -> str:
        return f"concatenation {self.first} {self.regime}"

    @property
    def record_name(self) -> str:
        return f"{self.first}-{self.regime}"

    def missing(self) -> bool:
        return self.record_name not in CONCATENATION

    def ready(self) -> bool:
        return all(trained_engram(name, self.regime) is not None for name in ORDER[self.first])

    def work(self, say: Callable[[str], object]) -> None:
        began = time.perf_counter()
        model = MemoryViT(datasets.backbone(PIXELS), unmasked=self.regime == "memory")
        data = datasets.splits(self.first, PIXELS, 1_000)
        steps: list[dict[str, Any]] = []
        alone = torch.zeros(0)
        for name in ORDER[self.first]:
            engram = trained_engram(name, self.regime)
            assert engram is not None
            model.attach(engram)
            logits, labels = predictions(model, data["test"], self.first)
            alone = alone if len(alone) else logits
            change = float((logits - alone).abs().max())
            accuracy = float((logits.argmax(1) == labels).float().mean())
            steps.append({"added": name, "test": accuracy, "largest_change_of_a_logit": change})
            say(f"+ {name}: {accuracy:.4f}")
        seconds = round(time.perf_counter() - began, 1)
        record = {"first": self.first, "regime": self.regime, "steps": steps, "seconds": seconds}
        CONCATENATION.append(self.record_name, record)


@torch.inference_mode()
def predictions(model: MemoryViT, data: Dataset, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one task and the labels, with every attached task in the pass."""
    logits, labels = [], []
    for batch in Loader(data, model.preprocessing, 64):
        pixels = normalise(batch.images, model.preprocessing)
        logits.append(model.eval()(pixels, tasks=list(model.tasks))[name])
        labels.append(batch.labels)
    return torch.cat(logits), torch.cat(labels)


def jobs() -> list[Concatenation]:
    return [Concatenation(first, regime) for first in ORDER for regime in ("memory", "masked")]


def table() -> list[str]:
    rows = []
    for job in jobs():
        record = CONCATENATION.get(job.record_name)
        if record is None:
            rows.append([job.first, job.regime, "not run", "", ""])
            continue
        cells = [
            f"{100 * step['test']:.1f}" + ("" if i == 0 else f" (+ {step['added']})")
            for i, step in enumerate(record["steps"])
        ]
        rows.append([job.first, job.regime, *cells])
    head = ("first task", "regime", "alone", "with one more task", "with two more")
    return markdown_table(head, rows)
