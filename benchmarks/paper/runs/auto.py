"""`auto` as a user runs it, and each of the regimes of its portfolio alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.paper.records import RUNS
from benchmarks.paper.runs import datasets
from benchmarks.paper.runs.settings import Setting, scores
from engram.data.datasets import Splits
from engram.model import MemoryViT
from engram.train.fit import fit
from engram.train.recipe import Recipe
from engram.train.search.auto import RATES, auto
from engram.train.search.sweep import sweep

EPOCHS, BATCH, EVALUATIONS, PATIENCE = 30, 64, 20, 4
#: Of regimes that `auto` does not train.
OWN_RATES = {"head": (1e-3, 1e-2), "pooling": (1e-3, 3e-3, 1e-2)}


@dataclass(frozen=True)
class UnchangedRun:
    """One seed: settings are chosen on validation images, and what was kept is tested once."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        return self.setting.run_name(self.seed)

    def missing(self) -> bool:
        return self.name not in RUNS

    def ready(self) -> bool:
        return True

    def work(self, say: Callable[[str], object]) -> None:
        setting = self.setting
        began = time.process_time()
        data = datasets.splits(setting.set, setting.pixels, setting.images)
        recipe = setting.recipe(0.0, self.seed).but(evaluations=Recipe().evaluations)
        result, lr, about = _trained(setting, data, recipe)
        record = {
            **asdict(setting),
            **scores(lr, self.seed, result.metrics["val"], result.metrics["test"], about["size"]),
            **{key: value for key, value in about.items() if key != "size"},
            "train_images": len(data["train"]),
            "cpu_seconds": round(time.process_time() - began, 1),
        }
        RUNS.append(self.name, record)
        say(f"{result.regime} lr {lr:g} val {record['val']:.4f} test {record['test']:.4f}")


def _trained(setting: Setting, data: Splits, recipe: Recipe) -> tuple[Any, float, dict[str, Any]]:
    """The result of the best of a regime, its learning rate, and what else is recorded."""
    model, regime = MemoryViT(setting.load_backbone()), setting.regime
    about: dict[str, Any] = {}
    lr = 0.0
    if regime == "auto":
        result: Any = auto(model, "task", data, recipe, test=True)
        about = {"kept": result.regime, "tried": [asdict(one) for one in result.tried]}
    elif regime == "readout":
        model.add_task("task", data.classes, regime=regime)
        result = fit(model, "task", data, recipe, test=True)
    else:
        rates = RATES[regime].first if regime in RATES else OWN_RATES[regime]
        recipe = recipe.but(evaluations=EVALUATIONS, patience=PATIENCE)
        result = sweep(model, "task", data, recipe, lrs=rates, regime=regime, test=True)
        lr = result.best.lr
    parameters = model.task("task").named_parameters()
    return result, lr, {**about, "size": sum(p.numel() for n, p in parameters if n[:5] != "head.")}
