"""What is trained, and the small records that it leaves: a run that has a record is never repeated.

    records/rates/SETTING.json        validation accuracy of every learning rate that was tried
    records/runs/SETTING-seedN.json   one run at the chosen rate: validation and test accuracy

A record is written whole or not at all, and a run is locked while somebody works on it; so any
number of processes can work through the same list, and killing one loses the run it was in.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import sets
from torch import Tensor

from engram.inference.evaluate import evaluate
from engram.model import MemoryViT
from engram.tasks.regimes import REGIMES
from engram.train.fit import fit
from engram.train.recipe import Recipe

RECORDS = Path(os.environ.get("ENGRAM_PAPER_RECORDS", Path(__file__).parent / "records"))
EPOCHS, BATCH = 10, 32  # through the trunk
SEEDS = (0, 1, 2)

#: The rates that are tried through the trunk, by regime.
RATES: Mapping[str, tuple[float, ...]] = {
    "full": (5e-5, 1e-4),
    "class": (1e-3, 3e-3),
    "memory": (1e-3, 3e-3),
    "adapter": (1e-3, 3e-3),
}


@dataclass(frozen=True)
class Setting:
    """One row of a table on one set. What is left at its default is not part of its name."""

    set: str
    regime: str
    cells: int = 5
    update: str = "fresh"
    width: int = 32  # of the adapters
    pixels: int = 112
    images: int = 1_000  # at most; pets and flowers have fewer
    epochs: int = EPOCHS
    batch: int = BATCH
    after_norm: bool = False  # cells join behind the norm
    place: str = "both"  # of the adapters: beside attention, mlp, or both
    head_rate: float = 1.0  # the head's learning rate, as a multiple of the others'
    views: int = 0  # augmented views from the cache
    augment: str = "auto"  # what the views are; auto: what suits the set

    def __post_init__(self) -> None:
        parts = REGIMES[self.regime]
        object.__setattr__(self, "cells", self.cells if parts.cells else 0)
        object.__setattr__(self, "width", self.width if parts.adapters else 0)

    @property
    def slug(self) -> str:
        parts = REGIMES[self.regime]
        words = [self.set, str(self.pixels), str(self.images), self.regime]
        if parts.cells:
            words.append(f"m{self.cells}")
        if parts.adapters:
            words.append(f"w{self.width}")
        words += [] if self.update == "fresh" else [self.update]
        words += ["after"] if self.after_norm else []
        words += [] if self.place == "both" else [self.place]
        words += [] if self.head_rate == 1 else [f"h{self.head_rate:g}"]
        words += [f"v{self.views}"] if self.views else []
        words += [] if self.augment == "auto" else [self.augment]
        return "-".join([*words, f"e{self.epochs}", f"b{self.batch}"])

    @property
    def plain(self) -> bool:
        """As the paper has it, but for the regime and the number of cells."""
        return (self.update, self.after_norm, self.head_rate, self.views) == ("fresh", False, 1, 0)

    @staticmethod
    def label(record: Mapping[str, Any]) -> str:
        """What a record is of, in words."""
        setting = Setting(**{i.name: record[i.name] for i in fields(Setting) if i.name in record})
        slug = setting.slug.removesuffix(f"-e{setting.epochs}-b{setting.batch}")
        return slug.replace(f"-{setting.images}-", " px, ", 1).replace("-", " ")

    def add_to(self, model: MemoryViT, name: str, seed: int) -> int:
        """Add the untrained task, and say how many parameters it has without its head."""
        classes = sets.splits(self.set, self.pixels, self.images).classes
        task = model.add_task(
            name,
            classes,
            self.cells,
            regime=self.regime,
            update=self.update,
            adapter_width=self.width or 32,
            seed=seed,
        )
        if self.after_norm:  # nothing but converted checkpoints has it, so there is no option
            task.spec = replace(task.spec, after_norm=True)
        count = sum(p.numel() for n, p in task.named_parameters() if not n.startswith("head."))
        if self.place != "both":
            assert task.adapters is not None
            absent = {"attention": 1, "mlp": 0}[self.place]
            for parameter in task.adapters.parameters():
                _leave_out(parameter, absent)
                count -= parameter[:, absent].numel()
        return count

    def recipe(self, lr: float, seed: int = 0) -> Recipe:
        return Recipe(
            epochs=self.epochs,
            batch=self.batch,
            micro_batch=self.batch,
            lr=lr,
            seed=seed,
            data_seed=seed,
            evaluations=1,
            workers=0,
            views=self.views,
            augment=self.augment if self.views else "none",
            min_area=0.35,
        )


def _leave_out(parameter: Tensor, place: int) -> None:
    """Adapters at this place never learn; `up` starts at zero, so they are as good as absent."""

    def without(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[:, place] = 0
        return gradient

    parameter.register_hook(without)


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def write(path: Path, record: Mapping[str, Any]) -> None:
    sets.keep(path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())


def rates_path(setting: Setting) -> Path:
    return RECORDS / "rates" / f"{setting.slug}.json"


def run_path(setting: Setting, seed: int) -> Path:
    return RECORDS / "runs" / f"{setting.slug}-seed{seed}.json"


def engram_path(setting: Setting, seed: int) -> Path:
    return sets.WORK / "engrams" / f"{setting.slug}-seed{seed}.safetensors"


@contextmanager
def claimed(name: str) -> Iterator[bool]:
    """Whether the work of this name is ours; a lock that ends with the process that holds it."""
    lock = sets.WORK / "locks" / f"{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


# Through the trunk, one run at a time


@dataclass(frozen=True)
class Through:
    """One seed of a setting, tested once.

    The first seed tries every rate, and the best on validation counts; what each rate learned is
    kept until then, so a killed run loses one rate at most. Other seeds take its rate, and settings
    that are `like` another one take the rate of that.
    """

    setting: Setting
    seed: int
    like: Setting | None = None

    @property
    def name(self) -> str:
        return f"{self.setting.slug}-seed{self.seed}"

    @property
    def chooses(self) -> bool:
        return self.like is None and self.seed == SEEDS[0]

    def missing(self) -> list[int]:
        return [] if run_path(self.setting, self.seed).exists() else [self.seed]

    def ready(self) -> bool:
        return self.chooses or run_path(self.like or self.setting, SEEDS[0]).exists()

    def work(self, say: Callable[[str], object]) -> None:
        if self.chooses:
            lr, model, about = self._best(say)
        else:
            lr = chosen(self.like or self.setting)
            model, about = trained(self.setting, lr, self.seed)
        test(self.setting, lr, self.seed, model, about, say)
        if self.chooses:
            for rate in RATES[self.setting.regime]:
                self._kept(rate).unlink(missing_ok=True)

    def _best(self, say: Callable[[str], object]) -> tuple[float, MemoryViT, dict[str, Any]]:
        """The best of all rates; those that were tried before are not tried again."""
        setting, path = self.setting, rates_path(self.setting)
        for lr in RATES[setting.regime]:
            record = read(path) or {**asdict(setting), "val": {}}
            if f"{lr:g}" in record["val"]:
                continue
            model, about = trained(setting, lr, self.seed)
            self._kept(lr).parent.mkdir(parents=True, exist_ok=True)
            model.save("task", self._kept(lr))
            write(path, {**record, "val": {**record["val"], f"{lr:g}": [about]}})
            say(f"lr {lr:g} val {about['accuracy']:.4f}, {about['cpu_seconds']:.0f} s")
        best, record = chosen(setting), read(path) or {}
        model = MemoryViT(sets.trunk(setting.pixels))
        model.attach(self._kept(best))
        return best, model, record["val"][f"{best:g}"][0]

    def _kept(self, lr: float) -> Path:
        return engram_path(self.setting, self.seed).with_suffix(f".{lr:g}.safetensors")


def trained(setting: Setting, lr: float, seed: int) -> tuple[MemoryViT, dict[str, Any]]:
    """One run through the trunk, and what is known of it before its test."""
    began = time.process_time()
    model = MemoryViT(sets.trunk(setting.pixels))
    parameters = setting.add_to(model, "task", seed)
    data = sets.splits(setting.set, setting.pixels, setting.images)
    val = fit(model, "task", data, setting.recipe(lr, seed)).metrics["val"]
    about = {
        "seed": seed,
        "accuracy": val["accuracy"],
        "loss": round(val["loss"], 4),
        "parameters": parameters,
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    return model, about


def test(
    setting: Setting,
    lr: float,
    seed: int,
    model: MemoryViT,
    about: Mapping[str, Any],
    say: Callable[[str], object],
) -> None:
    """Test a trained model, once, and record it."""
    data = sets.splits(setting.set, setting.pixels, setting.images)
    found = evaluate(model, data, "task", workers=0)
    if setting.regime == "memory":  # the others are used by nobody later
        engram_path(setting, seed).parent.mkdir(parents=True, exist_ok=True)
        model.save("task", engram_path(setting, seed))
    record = {
        **asdict(setting),
        **described(lr, seed, about, found, about["parameters"]),
        "train_images": len(data["train"]),
        "cpu_seconds": about["cpu_seconds"],
    }
    write(run_path(setting, seed), record)
    say(f"lr {lr:g} val {record['val']:.4f} test {record['test']:.4f}")


def described(
    lr: float, seed: int, val: Mapping[str, Any], test: Mapping[str, Any], parameters: int
) -> dict[str, Any]:
    return {
        "lr": lr,
        "seed": seed,
        "val": val["accuracy"],
        "val_loss": round(val["loss"], 4),
        "test": test["accuracy"],
        "test_images": test["images"],
        "parameters": parameters,
    }


def chosen(pilot: Setting) -> float:
    """The rate that the records of this setting choose."""
    record = read(rates_path(pilot))
    assert record is not None, f"no rates were tried for {pilot.slug}"
    return chosen_in(record)


def chosen_in(record: Mapping[str, Any]) -> float:
    """The rate with the best mean validation accuracy; of equal ones, the lower loss."""

    def good(lr: str) -> tuple[float, float]:
        tried = record["val"][lr]
        mean = sum(one["accuracy"] for one in tried) / len(tried)
        return round(mean, 6), -sum(one["loss"] for one in tried) / len(tried)

    return float(max(record["val"], key=good))


def all_rates() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RECORDS / "rates").glob("*.json"))]
