"""Training with the whole backbone in every step, one run at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.records import RATES, RUNS
from benchmarks.paper.runs import datasets
from benchmarks.paper.runs.settings import SEEDS, Setting, chosen_rate, engram_path, scores
from engram.data.datasets import Splits
from engram.inference.evaluate import evaluate
from engram.model import MemoryViT
from engram.train.fit import fit

#: The learning rates that are tried, by regime.
LEARNING_RATES: Mapping[str, tuple[float, ...]] = {
    "full": (5e-5, 1e-4),
    "class": (1e-3, 3e-3),
    "memory": (1e-3, 3e-3),
    "adapter": (1e-3, 3e-3),
    "lora": (1e-3, 3e-3),
}


@dataclass(frozen=True)
class BackboneRun:
    """One seed of a setting, tested once.

    The first seed tries every learning rate and takes the best on validation. The engram of each
    rate is kept until then, so a killed run loses one rate at most. Other seeds take the same rate,
    and settings with `like` take the rate of that other setting.
    """

    setting: Setting
    seed: int
    like: Setting | None = None

    @property
    def name(self) -> str:
        return self.setting.run_name(self.seed)

    @property
    def chooses(self) -> bool:
        """Whether this run tries several rates."""
        return self.like is None and self.seed == SEEDS[0]

    def missing(self) -> bool:
        return self.name not in RUNS

    def ready(self) -> bool:
        return self.chooses or (self.like or self.setting).run_name(SEEDS[0]) in RUNS

    def work(self, say: Callable[[str], object]) -> None:
        if self.chooses:
            lr, model, about = self._best(say)
        else:
            lr = chosen_rate(self.like or self.setting)
            model, about = self.train(lr)
        self._test(lr, model, about, say)
        if self.chooses:
            for rate in LEARNING_RATES[self.setting.regime]:
                self._candidate(rate).unlink(missing_ok=True)

    def _best(self, say: Callable[[str], object]) -> tuple[float, Any, dict[str, Any]]:
        """The best of all rates; rates that have a record are not tried again."""
        setting = self.setting
        for lr in LEARNING_RATES[setting.regime]:
            record = RATES.get(setting.slug) or {**asdict(setting), "val": {}}
            if f"{lr:g}" in record["val"]:
                continue
            model, about = self.train(lr)
            self._candidate(lr).parent.mkdir(parents=True, exist_ok=True)
            self.save(model, self._candidate(lr))
            RATES.append(setting.slug, {**record, "val": {**record["val"], f"{lr:g}": [about]}})
            say(f"lr {lr:g} val {about['accuracy']:.4f}, {about['cpu_seconds']:.0f} s")
        best, record = chosen_rate(setting), RATES.get(setting.slug) or {}
        model = self.load(self._candidate(best))
        return best, model, record["val"][f"{best:g}"][0]

    def _candidate(self, lr: float) -> Path:
        """The engram of one rate, until the best is known."""
        return engram_path(self.setting, self.seed).with_suffix(f".{lr:g}.safetensors")

    def _test(
        self, lr: float, model: Any, about: dict[str, Any], say: Callable[[str], object]
    ) -> None:
        """Test a trained model, once, and record it."""
        setting = self.setting
        data = datasets.splits(setting.set, setting.pixels, setting.images)
        found = self.evaluate(model, data)
        if setting.regime == "memory":  # concatenation needs these engrams
            engram_path(setting, self.seed).parent.mkdir(parents=True, exist_ok=True)
            self.save(model, engram_path(setting, self.seed))
        record = {
            **asdict(setting),
            **scores(lr, self.seed, about, found, about["parameters"]),
            "train_images": len(data["train"]),
            "cpu_seconds": about["cpu_seconds"],
        }
        RUNS.append(self.name, record)
        say(f"lr {lr:g} val {record['val']:.4f} test {record['test']:.4f}")

    # What is trained: overridden for what is no task of Engram

    def train(self, lr: float) -> tuple[Any, dict[str, Any]]:
        """A trained model, and what is known of it before the test."""
        began = time.process_time()
        setting = self.setting
        model = MemoryViT(setting.load_backbone())
        parameters = setting.add_to(model, "task", self.seed)
        data = datasets.splits(setting.set, setting.pixels, setting.images)
        val = fit(model, "task", data, setting.recipe(lr, self.seed)).metrics["val"]
        return model, about_run(self.seed, val, parameters, began)

    def save(self, model: Any, path: Path) -> None:
        model.save("task", path)

    def load(self, path: Path) -> Any:
        model = MemoryViT(self.setting.load_backbone())
        model.attach(path)
        return model

    def evaluate(self, model: Any, data: Splits) -> Mapping[str, Any]:
        """Metrics on the test images."""
        return evaluate(model, data, "task", workers=0)


def about_run(seed: int, val: Mapping[str, Any], parameters: int, began: float) -> dict[str, Any]:
    """The validation of a run that took the processor time since `began`."""
    return {
        "seed": seed,
        "accuracy": val["accuracy"],
        "loss": round(val["loss"], 4),
        "parameters": parameters,
        "cpu_seconds": round(time.process_time() - began, 1),
    }
