"""How fast it is: tasks beside the plain trunk, and beside other ways to do the same work.

Every time is compared within one run, the contestants taking turns; `engram bench` shows a quick
measure, `benchmarks/speed` in the repository takes the same functions further.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import EngramError
from engram.experiments.peers import (
    Lora,
    Peer,
    Separate,
    Straightforward,
    VitPytorch,
    installed,
    transformers_vit,
)
from engram.experiments.timing import Case, Say, Timing, compare, machine, machine_words
from engram.memory import reads_tokens
from engram.model import MemoryViT
from engram.tasks.costs import Costs, task_costs
from engram.tasks.shape import TrunkShape
from engram.trunks.load import load_trunk
from engram.util.description import Description
from engram.vit import HeadConfig, ViT, ViTConfig

Step = Callable[[], None]
Key = TypeVar("Key", bound=Hashable)

_SHAPES = {"ti": (192, 3, 12), "s": (384, 6, 12), "b": (768, 12, 12), "l": (1024, 16, 24)}
PLAIN = "plain trunk"


@dataclass(frozen=True)
class Size:
    """What is measured, and for how long."""

    trunk: ViT
    cells: int = 5
    classes: int = 10
    seconds: float = 5.0  # for each table
    least: int = 3  # rounds, whatever they take
    most: int = 25
    passes: int = 3  # at most, of a peer that needs one for each task

    def model(self, tasks: int, regime: str = "masked", cells: int | None = None) -> MemoryViT:
        """A model with so many untrained tasks."""
        model = MemoryViT(self.trunk)
        for i in range(tasks):
            count = self.cells if cells is None else cells
            model.add_task(f"task{i}", self.classes, count, regime=regime)
        return model.eval()

    def pixels(self, batch: int) -> Tensor:
        return torch.randn(batch, 3, *self.trunk.config.image_size)

    def labels(self, batch: int) -> Tensor:
        return torch.randint(0, self.classes, (batch,))

    def task_costs(self, regime: str = "masked") -> Costs:
        """What one task adds, counted."""
        return task_costs(TrunkShape.of(self.trunk), self.model(1, regime).task("task0").spec)

    def compare(self, cases: Mapping[Key, Case], say: Say) -> dict[Key, Timing]:
        return compare(cases, seconds=self.seconds, least=self.least, most=self.most, say=say)


@dataclass(frozen=True)
class Row:
    """One measured way of doing something."""

    what: str
    tasks: int
    batch: int
    timing: Timing
    limit: float | None = None  # the ratio, if time were multiply-accumulates
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        about = {"what": self.what, "tasks": self.tasks, "batch": self.batch}
        return {**about, **asdict(self.timing), "limit": self.limit, "note": self.note}


def shaped(name: str) -> ViT:
    """A trunk with random weights of a usual shape, such as ViT-B/32: time does not see values."""
    found = re.fullmatch(r"(?:vit-)?(ti|s|b|l)/(8|14|16|32)", name.lower())
    if not found:
        raise EngramError(
            f"There is no shape {name!r}; write ViT-Ti, -S, -B or -L and the patch size, such as "
            "ViT-B/32."
        )
    width, heads, depth = _SHAPES[found[1]]
    patch = int(found[2])
    config = ViTConfig((224, 224), patch, width, depth, heads, 4 * width, head=HeadConfig(1000))
    trunk = ViT(config).eval()
    trunk.source = f"ViT-{found[1].title()}/{patch}, random weights"
    return trunk


# Forward


def forward(
    size: Size, tasks: Sequence[int], batches: Sequence[int], say: Say = lambda text: None
) -> list[Row]:
    """Answers of many tasks, in all the ways that are there."""
    models = {count: size.model(count) for count in tasks}
    naive = {count: Straightforward(model) for count, model in models.items()}
    peers = _peers(size, tasks)
    middle = sorted(tasks)[len(tasks) // 2]
    adapted = size.model(middle, "masked+adapter")
    plain = transformers_vit(size.trunk, 1000) if "lora" in installed(size.trunk) else None
    rows = []
    for batch in batches:
        pixels = size.pixels(batch)
        cases = {(PLAIN, 0): Case(partial(_plain, size.trunk, pixels))}
        if plain is not None:
            cases["transformers, plain", 0] = Case(partial(plain, pixels))
        for count in tasks:
            cases["engram", count] = Case(partial(models[count], pixels))
            cases["straightforward", count] = Case(partial(naive[count], pixels))
            for what, peer in peers[count].items():
                passes = min(count, size.passes)
                cases[what, count] = Case(partial(peer.one_pass, pixels), passes, count)
        cases["engram, exact", middle] = Case(partial(models[middle], pixels, exact=True))
        cases["engram, masked+adapter", middle] = Case(partial(adapted, pixels))
        say(f"forward, batch {batch}")
        with torch.inference_mode():
            found = size.compare(cases, say)
        for (what, count), timing in found.items():
            case = cases[what, count]
            note = f"{case.runs} of {case.of} passes" if case.scale != 1 else ""
            rows.append(Row(what, count, batch, timing, _limit(size, what, count), note))
    return rows


def _limit(size: Size, what: str, count: int) -> float | None:
    """The ratio if time were multiply-accumulates."""
    if what == PLAIN:
        return 1.0
    if not what.startswith("engram"):
        return None
    regime = "masked+adapter" if what.endswith("adapter") else "masked"
    return 1 + count * size.task_costs(regime).share


def _plain(trunk: ViT, pixels: Tensor) -> Tensor:
    out: Tensor = trunk(pixels) if trunk.head is not None else trunk.tokens(pixels)
    return out


def _peers(size: Size, tasks: Sequence[int]) -> dict[int, dict[str, Peer]]:
    """Those that need a pass for each task, by the number of tasks."""
    trunk, there = size.trunk, installed(size.trunk)
    shared: dict[str, Peer] = {"separate models": Separate(trunk, max(tasks), size.classes)}
    if "vit-pytorch" in there:
        shared["vit-pytorch"] = VitPytorch(trunk, max(tasks), size.classes, size.cells)
    found = {count: dict(shared) for count in tasks}
    if "lora" in there:  # switching takes longer the more adapters there are
        for count in tasks:
            found[count]["PEFT LoRA"] = Lora(trunk, count, size.classes)
    return found


# Training


def training(size: Size, batch: int, say: Say = lambda text: None) -> list[Row]:
    """One step of one task: forward, backward, update; ratios to the plain trunk's forward."""
    share = size.task_costs()
    back = 1 + 2 * (share.share + share.once / batch / share.trunk_macs)  # the weights are frozen
    makers: dict[str, Callable[[], Step]] = {PLAIN: partial(plain_step, size, batch)}
    makers.update(steps(size, batch))
    cases = {name: Case(make()) for name, make in makers.items()}
    say(f"training step, batch {batch}")
    found = size.compare(cases, say)
    limits = {PLAIN: 1.0, "engram": back, "engram, from the cache": cached_limit(size)}
    return [Row(name, 1, batch, timing, limits.get(name)) for name, timing in found.items()]


def steps(size: Size, batch: int) -> dict[str, Callable[[], Step]]:
    """Ways to train one task, by name; each is made when it is called."""
    makers: dict[str, Callable[[], Step]] = {
        "engram": partial(_engram_step, size, batch),
        "engram, from the cache": partial(cached_step, size, batch),
        "engram, gradients through the trunk": partial(_engram_step, size, batch, True),
        "straightforward, trunk frozen": partial(_straightforward_step, size, batch, False),
        "straightforward, all gradients": partial(_straightforward_step, size, batch, True),
        "separate model, full": lambda: _peer_step(
            size, batch, Separate(size.trunk, 1, size.classes)
        ),
    }
    there = installed(size.trunk)
    if "vit-pytorch" in there:
        makers["vit-pytorch"] = lambda: _peer_step(
            size, batch, VitPytorch(size.trunk, 1, size.classes, size.cells)
        )
    if "lora" in there:
        makers["PEFT LoRA"] = lambda: _peer_step(size, batch, Lora(size.trunk, 1, size.classes))
    return makers


def plain_step(size: Size, batch: int) -> Step:
    """The plain trunk's forward, which steps are compared with."""
    pixels = size.pixels(batch)

    def step() -> None:
        with torch.inference_mode():
            _plain(size.trunk, pixels)

    return step


def cached_limit(size: Size, variants: int = 1) -> float:
    """The ratio of `cached_step`, if time were multiply-accumulates: `memory.from_normed`."""
    config, costs = size.trunk.config, size.task_costs()
    n, width = config.prefix + config.grid[0] * config.grid[1], config.width
    step = 2 * variants * (costs.macs // config.depth)  # of a layer, there and back
    if reads_tokens(size.trunk, n, variants, passes=2):
        step += 2 * variants * 2 * (config.heads - 1) * (n + 1 + size.cells) * width
    else:
        step += 2 * n * width**2
    return (config.depth * step + 2 * variants * costs.head_macs) / costs.trunk_macs


def cached_step(size: Size, batch: int, variants: int = 1) -> Step:
    """A step of several variants from rows as the cache gives them: half precision, all layers."""
    model = size.model(variants)
    config = size.trunk.config
    tokens = config.prefix + config.grid[0] * config.grid[1]
    rows = torch.randn(batch, config.depth * tokens + 1, config.width).half()

    def logits() -> Iterable[Tensor]:
        layers = [rows[:, i : i + tokens].float() for i in range(0, rows.shape[1] - 1, tokens)]
        return model.from_cache(layers, rows[:, -1].float(), list(model.tasks)).values()

    return _step(logits, [t.parameters() for t in model.tasks.values()], size.labels(batch))


def _engram_step(size: Size, batch: int, through_trunk: bool = False) -> Step:
    """With `through_trunk`, autograd is made to keep the trunk's activations."""
    model, pixels = size.model(1), size.pixels(batch).requires_grad_(through_trunk)
    task = model.task("task0")

    def logits() -> Iterable[Tensor]:
        pixels.grad = None
        return [model(pixels, tasks=["task0"])["task0"]]

    return _step(logits, [task.parameters()], size.labels(batch))


def _straightforward_step(size: Size, batch: int, all_gradients: bool) -> Step:
    own = Size(copy.deepcopy(size.trunk), size.cells, size.classes)
    model = own.model(1)
    naive, pixels = Straightforward(model), size.pixels(batch)
    own.trunk.requires_grad_(all_gradients)

    def logits() -> Iterable[Tensor]:
        own.trunk.zero_grad()
        return [naive(pixels)["task0"]]

    return _step(logits, [model.task("task0").parameters()], size.labels(batch))


def _peer_step(size: Size, batch: int, peer: Peer) -> Step:
    pixels = size.pixels(batch)
    return _step(lambda: [peer.one_pass(pixels)], [peer.trained()], size.labels(batch))


def _step(
    logits: Callable[[], Iterable[Tensor]],
    parameters: Sequence[Iterable[nn.Parameter]],
    labels: Tensor,
) -> Step:
    """Forward, backward, clip and update, for each of the tasks whose logits and parameters come.

    The default recipe's optimiser, for everybody.
    """
    groups = [list(group) for group in parameters]
    optimizers = [torch.optim.AdamW(group, 1e-3) for group in groups]

    def step() -> None:
        torch.stack([F.cross_entropy(one, labels) for one in logits()]).sum().backward()  # type: ignore[no-untyped-call]
        for group, optimizer in zip(groups, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(group, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


# `engram bench`


def bench(
    backbone: str | None = None,
    *,
    shape: str | None = None,
    tasks: Sequence[int] = (1, 10, 100),
    batches: Sequence[int] = (1, 16),
    cells: int = 5,
    seconds: float = 5.0,
    threads: int | None = None,
    say: Say = lambda text: None,
) -> Description:
    """A quick measure: forward and one training step, about `seconds` for each table of them."""
    if backbone and shape:
        raise EngramError(f"Both {backbone!r} and the shape {shape!r} were given; give one.")
    for what, numbers in (("--tasks", tasks), ("--batch", batches)):
        if not numbers or min(numbers) < 1:
            given = ",".join(map(str, numbers))
            raise EngramError(f"{what} is {given!r}; give whole numbers from 1 on, such as 1,10.")
    if not seconds > 0:
        raise EngramError(f"--seconds is {seconds:g}; give a number above 0, such as 5.")
    if threads is not None:
        if threads < 1:
            raise EngramError(f"--threads is {threads}; at least one is needed.")
        torch.set_num_threads(threads)
    trunk = shaped(shape) if shape else load_trunk(backbone or "pico")
    size = Size(trunk, cells=cells, seconds=seconds, most=100_000)
    found = {"forward": forward(size, tasks, batches, say)}
    found["training"] = [row for batch in batches for row in training(size, batch, say)]
    about = machine()
    document = {
        "machine": about,
        "trunk": trunk.source,
        "cells": cells,
        **{name: [row.to_dict() for row in rows] for name, rows in found.items()},
    }
    there = ", ".join(installed(trunk)) or "none that is installed and fits"
    told = [
        ("machine", machine_words(about)),
        ("trunk", trunk.source),
        ("cells", str(cells)),
        ("other libraries", there),
        ("ratio", "to the plain trunk's forward for the same images, median and quartiles"),
    ]
    columns = ("measured", "tasks", "batch", "ms", "ratio", "quartiles", "by FLOPs", "")
    table = [_words(name, row) for name, rows in found.items() for row in rows]
    return Description(document, told, columns, tuple(table))


def _words(section: str, row: Row) -> tuple[str, ...]:
    time = row.timing
    return (
        f"{row.what} ({section})" if section == "training" else row.what,
        str(row.tasks or ""),
        str(row.batch),
        f"{1e3 * time.seconds:,.1f}",
        f"{time.ratio:.2f}",
        f"{time.low:.2f} to {time.high:.2f}",
        "" if row.limit is None else f"{row.limit:.2f}",
        row.note,
    )
