"""Speed: tasks compared with the plain backbone, and with other ways to do the same work.

Times are compared within one run, in which all methods take turns. `engram bench` is a quick
measurement; `benchmarks/speed` in the repository uses the same functions for a thorough one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.backbones.load import load_backbone
from engram.backbones.random import backbone_of_shape
from engram.backbones.shape import BackboneShape
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
from engram.experiments.timing import Case, Key, Say, Timing, compare, describe_machine, machine
from engram.methods import method_class
from engram.methods.forward import Cached, reads_tokens
from engram.methods.method import Needs
from engram.model import MemoryViT
from engram.tasks.costs import Costs, task_costs
from engram.train.cache import keys_values
from engram.util.description import Description
from engram.util.devices import device_for, wait_for
from engram.vit import ViT

Step = Callable[[], None]

PLAIN = "plain backbone"


@dataclass(frozen=True)
class Workload:
    """What is measured, and for how long."""

    backbone: ViT
    cells: int = 5
    classes: int = 10
    seconds: float = 5.0  # for each table
    least: int = 3  # rounds, however long they take
    most: int = 25
    passes: int = 3  # that are measured of a method that needs a pass for each task

    def model(self, tasks: int, regime: str = "masked", cells: int | None = None) -> MemoryViT:
        """A model with this number of untrained tasks."""
        model = MemoryViT(self.backbone)
        count = None
        if "cells" in method_class(regime).setting_names():
            count = self.cells if cells is None else cells
        for i in range(tasks):
            model.add_task(f"task{i}", self.classes, count, regime=regime)
        return model.eval()

    def pixels(self, batch: int) -> Tensor:
        return torch.randn(batch, 3, *self.backbone.config.image_size, device=self.device)

    def labels(self, batch: int) -> Tensor:
        return torch.randint(0, self.classes, (batch,), device=self.device)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def task_costs(self, regime: str = "masked") -> Costs:
        """What one task adds to the pass, by the formulas."""
        return task_costs(BackboneShape.of(self.backbone), self.model(1, regime).task("task0").spec)

    def compare(self, cases: Mapping[Key, Case], say: Say) -> dict[Key, Timing]:
        return compare(
            cases, seconds=self.seconds, least=self.least, most=self.most, say=say,
            wait=partial(wait_for, self.device),
        )  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """The time of one method."""

    what: str
    tasks: int
    batch: int
    timing: Timing
    limit: float | None = None  # the ratio of multiply-accumulates
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        about = {"what": self.what, "tasks": self.tasks, "batch": self.batch}
        return {**about, **asdict(self.timing), "limit": self.limit, "note": self.note}


# Forward


def forward(
    workload: Workload, tasks: Sequence[int], batches: Sequence[int], say: Say = lambda text: None
) -> list[Measurement]:
    """Time the answers of many tasks, with every method that is available."""
    models = {count: workload.model(count) for count in tasks}
    naive = {count: Straightforward(model) for count, model in models.items()}
    peers = _peers(workload, tasks)
    middle = sorted(tasks)[len(tasks) // 2]
    adapted = workload.model(middle, "masked+adapter")
    plain = (
        transformers_vit(workload.backbone, 1000)
        if "lora" in installed(workload.backbone)
        else None
    )
    rows = []
    for batch in batches:
        pixels = workload.pixels(batch)
        cases = {(PLAIN, 0): Case(partial(_plain, workload.backbone, pixels))}
        if plain is not None:
            cases["transformers, plain", 0] = Case(partial(plain, pixels))
        for count in tasks:
            cases["engram", count] = Case(partial(models[count], pixels))
            cases["straightforward", count] = Case(partial(naive[count], pixels))
            for what, peer in peers[count].items():
                passes = min(count, workload.passes)
                cases[what, count] = Case(partial(peer.one_pass, pixels), passes, count)
        cases["engram, exact", middle] = Case(partial(models[middle], pixels, exact=True))
        cases["engram, masked+adapter", middle] = Case(partial(adapted, pixels))
        say(f"forward, batch {batch}")
        with torch.inference_mode():
            found = workload.compare(cases, say)
        for (what, count), timing in found.items():
            case = cases[what, count]
            note = f"{case.runs} of {case.of} passes" if case.scale != 1 else ""
            limit = _limit(workload, what, count)
            rows.append(Measurement(what, count, batch, timing, limit, note))
    return rows


def _limit(workload: Workload, what: str, count: int) -> float | None:
    """The ratio of multiply-accumulates to those of the plain backbone, where it is known."""
    if what == PLAIN:
        return 1.0
    if not what.startswith("engram"):
        return None
    regime = "masked+adapter" if what.endswith("adapter") else "masked"
    return 1 + count * workload.task_costs(regime).share


def _plain(backbone: ViT, pixels: Tensor) -> Tensor:
    out: Tensor = backbone(pixels) if backbone.head is not None else backbone.tokens(pixels)
    return out


def _peers(workload: Workload, tasks: Sequence[int]) -> dict[int, dict[str, Peer]]:
    """Methods that need a pass for each task, by the number of tasks."""
    backbone, there = workload.backbone, installed(workload.backbone)
    shared: dict[str, Peer] = {"separate models": Separate(backbone, max(tasks), workload.classes)}
    if "vit-pytorch" in there:
        shared["vit-pytorch"] = VitPytorch(backbone, max(tasks), workload.classes, workload.cells)
    found = {count: dict(shared) for count in tasks}
    if "lora" in there:  # switching takes longer the more adapters there are
        for count in tasks:
            found[count]["PEFT LoRA"] = Lora(backbone, count, workload.classes)
    return found


# Training


def training(workload: Workload, batch: int, say: Say = lambda text: None) -> list[Measurement]:
    """Time a training step of one task: forward, backward and update.

    Ratios are to the forward pass of the plain backbone.
    """
    share = workload.task_costs()
    back = 1 + 2 * (
        share.share + share.once / batch / share.backbone_macs
    )  # the backbone is frozen
    makers: dict[str, Callable[[], Step]] = {PLAIN: partial(plain_step, workload, batch)}
    makers.update(steps(workload, batch))
    cases = {name: Case(make()) for name, make in makers.items()}
    say(f"training step, batch {batch}")
    found = workload.compare(cases, say)
    limits = {PLAIN: 1.0, "engram": back, "engram, from the cache": cached_limit(workload)}
    return [Measurement(name, 1, batch, timing, limits.get(name)) for name, timing in found.items()]


def steps(workload: Workload, batch: int) -> dict[str, Callable[[], Step]]:
    """Functions that build a training step of one task, by the name of the method."""
    backbone, classes, cells = workload.backbone, workload.classes, workload.cells
    peers: dict[str, Callable[[], Peer]] = {
        "separate model, full": lambda: Separate(backbone, 1, classes),
    }
    available = installed(backbone)
    if "vit-pytorch" in available:
        peers["vit-pytorch"] = lambda: VitPytorch(backbone, 1, classes, cells)
    if "lora" in available:
        peers["PEFT LoRA"] = lambda: Lora(backbone, 1, classes)
    return {
        "engram": partial(_engram_step, workload, batch),
        "engram, from the cache": partial(cached_step, workload, batch),
        "engram, gradients through the backbone": partial(_engram_step, workload, batch, True),
        "straightforward, backbone frozen": partial(_straightforward_step, workload, batch, False),
        "straightforward, all gradients": partial(_straightforward_step, workload, batch, True),
        **{name: partial(_peer_step, workload, batch, make) for name, make in peers.items()},
    }


def plain_step(workload: Workload, batch: int) -> Step:
    """The forward pass of the plain backbone, with which steps are compared."""
    pixels = workload.pixels(batch)

    def step() -> None:
        with torch.inference_mode():
            _plain(workload.backbone, pixels)

    return step


def cached_limit(workload: Workload, variants: int = 1, regime: str = "masked") -> float:
    """The ratio of multiply-accumulates of `cached_step`: forward and backward."""
    costs = workload.task_costs(regime)
    if regime == "masked":
        step = _masked_layers(workload, variants)
    else:  # gradients for the rows and for the maps, but none for the backbone's tokens
        shape = BackboneShape.of(workload.backbone)
        rank = workload.model(1, regime).task("task0").method.settings()["rank"]
        taken_in = (shape.depth + 1) * _tokens(workload) * shape.width * rank
        step = variants * (3 * costs.macs - taken_in)
    return (step + 2 * variants * costs.head_macs) / costs.backbone_macs


def _masked_layers(workload: Workload, variants: int) -> int:
    """What a step from the cache computes: no gradient for the backbone's weights."""
    config, costs = workload.backbone.config, workload.task_costs()
    n, width = _tokens(workload), config.width
    step = 2 * variants * (costs.macs // config.depth)  # of a layer
    if reads_tokens(workload.backbone, n, variants, passes=2):
        step += 2 * variants * 2 * (config.heads - 1) * (n + 1 + workload.cells) * width
    return config.depth * step


def _tokens(workload: Workload) -> int:
    config = workload.backbone.config
    return config.prefix + config.grid[0] * config.grid[1]


def cached_step(workload: Workload, batch: int, variants: int = 1, regime: str = "masked") -> Step:
    """A step of several variants on the rows of the cache: half precision, all layers.

    The cache of many masked tasks has keys and values, that of others the normed tokens.
    """
    model, backbone = workload.model(variants, regime), workload.backbone
    depth, tokens, names = backbone.config.depth, _tokens(workload), list(model.tasks)
    keys = regime == "masked" and not reads_tokens(backbone, tokens, variants, passes=2)
    kept = 2 * depth if keys else depth + (Needs.FINAL in model.task("task0").method.needs)
    shape = (batch, kept * tokens + 1, backbone.config.width)
    rows = torch.randn(shape, device=workload.device).half()

    def logits() -> Iterable[Tensor]:
        seen = [rows[:, i : i + tokens].float() for i in range(0, rows.shape[1] - 1, tokens)]
        final = seen[-1] if kept == depth + 1 else None
        layers = keys_values(seen, backbone) if keys else seen[:depth]
        return model.from_cache(Cached(rows[:, -1].float(), layers, final), names).values()

    return _step(logits, [t.parameters() for t in model.tasks.values()], workload.labels(batch))


def _engram_step(workload: Workload, batch: int, through_backbone: bool = False) -> Step:
    """With `through_backbone`, autograd keeps the backbone's activations, as without a frozen
    backbone.
    """
    model, pixels = workload.model(1), workload.pixels(batch).requires_grad_(through_backbone)
    task = model.task("task0")

    def logits() -> Iterable[Tensor]:
        pixels.grad = None
        return [model(pixels, tasks=["task0"])["task0"]]

    return _step(logits, [task.parameters()], workload.labels(batch))


def _straightforward_step(workload: Workload, batch: int, all_gradients: bool) -> Step:
    own = Workload(copy.deepcopy(workload.backbone), workload.cells, workload.classes)
    model = own.model(1)
    naive, pixels = Straightforward(model), workload.pixels(batch)
    own.backbone.requires_grad_(all_gradients)

    def logits() -> Iterable[Tensor]:
        own.backbone.zero_grad()
        return [naive(pixels)["task0"]]

    return _step(logits, [model.task("task0").parameters()], workload.labels(batch))


def _peer_step(workload: Workload, batch: int, make: Callable[[], Peer]) -> Step:
    peer, pixels = make(), workload.pixels(batch)
    return _step(lambda: [peer.one_pass(pixels)], [peer.trained()], workload.labels(batch))


def _step(
    logits: Callable[[], Iterable[Tensor]],
    parameters: Sequence[Iterable[nn.Parameter]],
    labels: Tensor,
) -> Step:
    """Forward, backward, clip and update, for each task by its logits and parameters.

    All methods use the optimiser of the default recipe.
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
    device: str = "auto",
    say: Say = lambda text: None,
) -> Description:
    """Measure forward passes and training steps, about `seconds` for each batch size of either."""
    if backbone and shape:
        raise EngramError(f"Both {backbone!r} and the shape {shape!r} were given; give one.")
    _check(tasks, batches, seconds, threads)
    if threads is not None:
        torch.set_num_threads(threads)
    vit = backbone_of_shape(shape) if shape else load_backbone(backbone or "pico")
    vit.to(device_for(device))
    workload = Workload(vit, cells=cells, seconds=seconds, most=100_000)
    found = {
        "forward": forward(workload, tasks, batches, say),
        "training": [row for batch in batches for row in training(workload, batch, say)],
    }
    return _description(workload, found)


def _check(
    tasks: Sequence[int], batches: Sequence[int], seconds: float, threads: int | None
) -> None:
    for what, numbers in (("--tasks", tasks), ("--batch", batches)):
        if not numbers or min(numbers) < 1:
            given = ",".join(map(str, numbers))
            raise EngramError(f"{what} is {given!r}; give whole numbers from 1 on, such as 1,10.")
    if not seconds > 0:
        raise EngramError(f"--seconds is {seconds:g}; give a number above 0, such as 5.")
    if threads is not None and threads < 1:
        raise EngramError(f"--threads is {threads}; at least one is needed.")


def _description(workload: Workload, found: Mapping[str, Sequence[Measurement]]) -> Description:
    about, backbone = machine(), workload.backbone
    document = {
        "machine": about,
        "device": str(workload.device),
        "backbone": backbone.source,
        "cells": workload.cells,
        **{name: [row.to_dict() for row in rows] for name, rows in found.items()},
    }
    rows = [
        ("machine", describe_machine(about)),
        ("device", str(workload.device)),
        ("backbone", backbone.source),
        ("cells", str(workload.cells)),
        ("other libraries", ", ".join(installed(backbone)) or "none that is installed and fits"),
        ("ratio", "to the plain backbone's forward pass for the same images, median and quartiles"),
    ]
    columns = ("measured", "tasks", "batch", "ms", "ratio", "quartiles", "by FLOPs", "")
    table = [_table_row(name, row) for name, rows in found.items() for row in rows]
    return Description(document, rows, columns, tuple(table))


def _table_row(section: str, row: Measurement) -> tuple[str, ...]:
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
