"""`engram bench`: the speed of tasks, compared with the plain backbone and with separate models.

`benchmarks/speed` in the repository measures with the same functions, other libraries too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, cycle
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.backbones.load import load_backbone
from engram.backbones.random import backbone_of_shape
from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.experiments.timing import (
    Case,
    Key,
    Say,
    Timing,
    compare,
    describe_machine,
    machine,
)
from engram.methods import Masked, MaskedAdapter, method_class
from engram.methods.forward import reads_tokens
from engram.methods.method import Cached, Needs
from engram.model import MemoryViT
from engram.tasks.costs import Costs, task_costs
from engram.train.features.cache import keys_values
from engram.util.tensors import device_for, wait_for
from engram.util.text import Description
from engram.vit import ViT

Step = Callable[[], None]

PLAIN = "plain backbone"
_DISTINCT = 4  # separate models in memory; each is larger than any cache of a processor


# What is timed


@dataclass(frozen=True)
class Workload:
    """A backbone and its tasks to measure, and for how long."""

    backbone: ViT
    cells: int = Masked().cells
    classes: int = 10
    seconds: float = 5.0  # for each table
    least: int = 3  # rounds, however long they take
    most: int = 25
    passes: int = 3  # that are measured of what needs a pass for each task

    def model(self, tasks: int, regime: str = Masked.name, cells: int | None = None) -> MemoryViT:
        """A model with this number of untrained tasks."""
        model, count = MemoryViT(self.backbone), None
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

    @property
    def tokens(self) -> int:
        """The number of tokens of an image."""
        config = self.backbone.config
        return config.prefix + config.grid[0] * config.grid[1]

    def task_costs(self, regime: str = Masked.name) -> Costs:
        """The costs of one task beside the pass, by the formulas."""
        return task_costs(
            BackboneShape.measure(self.backbone), self.model(1, regime).task("task0").spec
        )

    def compare(self, cases: Mapping[Key, Case], say: Say) -> dict[Key, Timing]:
        return compare(
            cases, seconds=self.seconds, least=self.least, most=self.most, say=say,
            wait=partial(wait_for, self.device),
        )  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """The time of one way to answer or to train."""

    what: str
    tasks: int
    batch: int
    timing: Timing
    limit: float | None = None  # the ratio of multiply-accumulates
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        about = {"what": self.what, "tasks": self.tasks, "batch": self.batch}
        return {**about, **asdict(self.timing), "limit": self.limit, "note": self.note}

    def to_row(self, section: str) -> tuple[str, ...]:
        time = self.timing
        return (
            f"{self.what} ({section})" if section == "training" else self.what,
            str(self.tasks or ""),
            str(self.batch),
            f"{1e3 * time.seconds:,.1f}",
            f"{time.ratio:.2f}",
            f"{time.low:.2f} to {time.high:.2f}",
            "" if self.limit is None else f"{self.limit:.2f}",
            self.note,
        )


class Peer(Protocol):
    """Another way to do the same work, of which a pass answers one task: each in turn."""

    def one_pass(self, pixels: Tensor) -> Tensor: ...
    def trained(self) -> Iterable[nn.Parameter]:
        """The parameters that a training step of the first task updates."""


class Separate:
    """A whole model for each task, as full fine-tuning produces them."""

    def __init__(self, backbone: ViT, tasks: int, classes: int) -> None:
        self.models = []
        for _ in range(min(tasks, _DISTINCT)):
            own = copy.deepcopy(backbone)
            own.head = None
            head = nn.Linear(backbone.config.width, classes).to(backbone.device)
            self.models.append((own.requires_grad_(True), head))
        self._next = cycle(self.models)

    def one_pass(self, pixels: Tensor) -> Tensor:
        vit, head = next(self._next)
        logits: Tensor = head(vit.pool(vit.tokens(pixels)))
        return logits

    def trained(self) -> Iterable[nn.Parameter]:
        vit, head = self.models[0]
        return chain(vit.parameters(), head.parameters())


# Forward

Cases = dict[tuple[str, int], Case]


def forward(
    workload: Workload,
    tasks: Sequence[int],
    batches: Sequence[int],
    say: Say = lambda text: None,
    others: Callable[[Tensor], Cases] = lambda pixels: {},
) -> list[Measurement]:
    """Time the answers of many tasks; `others` adds cases by name and number of tasks."""
    backbone = workload.backbone
    models = {count: workload.model(count) for count in tasks}
    middle = sorted(tasks)[len(tasks) // 2]
    adapted = workload.model(middle, MaskedAdapter.name)
    separate = Separate(backbone, max(tasks), workload.classes)
    limits: dict[tuple[str, int], float] = {(PLAIN, 0): 1.0}
    share, adapted_share = (workload.task_costs(m.name).share for m in (Masked, MaskedAdapter))
    rows = []
    for batch in batches:
        pixels = workload.pixels(batch)
        cases: Cases = {(PLAIN, 0): Case(partial(_plain, backbone, pixels))}
        for count in tasks:
            cases["engram", count] = Case(partial(models[count], pixels))
            limits["engram", count] = 1 + count * share
            passes = min(count, workload.passes)
            one_pass = partial(separate.one_pass, pixels)
            cases["separate models", count] = Case(one_pass, passes, count)
        cases["engram, exact", middle] = Case(partial(models[middle], pixels, exact=True))
        limits["engram, exact", middle] = 1 + middle * share
        with_adapters = f"engram, {MaskedAdapter.name}", middle
        cases[with_adapters] = Case(partial(adapted, pixels))
        limits[with_adapters] = 1 + middle * adapted_share
        cases |= others(pixels)
        say(f"forward, batch {batch}")
        with torch.inference_mode():
            found = workload.compare(cases, say)
        for key, timing in found.items():
            rows.append(Measurement(*key, batch, timing, limits.get(key), cases[key].note))
    return rows


def _plain(backbone: ViT, pixels: Tensor) -> Tensor:
    out: Tensor = backbone(pixels) if backbone.head is not None else backbone.tokens(pixels)
    return out


# Training


def training(
    workload: Workload,
    batch: int,
    say: Say = lambda text: None,
    others: Mapping[str, Callable[[], Step]] | None = None,
) -> list[Measurement]:
    """Time a training step of one task: forward, backward and update.

    Ratios are to the forward pass of the plain backbone. `others` builds further steps.
    """
    costs = workload.task_costs()
    # The backbone is frozen: it has no backward pass.
    limit = 1 + 2 * (costs.share + costs.once / batch / costs.backbone_macs)
    makers = {**steps(workload, batch), **(others or {})}
    cases = {PLAIN: Case(plain_step(workload, batch))}
    cases |= {name: Case(make()) for name, make in makers.items()}
    say(f"training step, batch {batch}")
    found = workload.compare(cases, say)
    limits = {PLAIN: 1.0, "engram": limit, "engram, from the cache": cached_limit(workload)}
    return [Measurement(name, 1, batch, timing, limits.get(name)) for name, timing in found.items()]


def steps(workload: Workload, batch: int) -> dict[str, Callable[[], Step]]:
    """Functions that build a training step of one task, by name."""

    def separate() -> Step:
        return peer_step(workload, batch, Separate(workload.backbone, 1, workload.classes))

    return {
        "engram": partial(_engram_step, workload, batch),
        "engram, from the cache": partial(cached_step, workload, batch),
        "engram, gradients through the backbone": partial(_engram_step, workload, batch, True),
        "separate model, full": separate,
    }


def plain_step(workload: Workload, batch: int) -> Step:
    """The forward pass of the plain backbone, with which steps are compared."""
    pixels = workload.pixels(batch)

    def step() -> None:
        with torch.inference_mode():
            _plain(workload.backbone, pixels)

    return step


def cached_limit(workload: Workload, variants: int = 1) -> float:
    """The ratio of multiply-accumulates of `cached_step`; the backbone's weights are frozen."""
    config, costs, n = workload.backbone.config, workload.task_costs(), workload.tokens
    step = 2 * variants * (costs.macs // config.depth)  # of a layer
    if reads_tokens(workload.backbone, n, variants, passes=2):
        step += 2 * variants * 2 * (config.heads - 1) * (n + 1 + workload.cells) * config.width
    return (config.depth * step + 2 * variants * costs.head_macs) / costs.backbone_macs


def cached_step(
    workload: Workload, batch: int, variants: int = 1, regime: str = Masked.name
) -> Step:
    """A step of several variants on the rows of the cache: half precision, all layers.

    The cache of many class tokens has keys and values, that of others the normed tokens.
    """
    model, backbone = workload.model(variants, regime), workload.backbone
    method, depth, tokens = model.task("task0").method, backbone.config.depth, workload.tokens
    keys = method.streams and not reads_tokens(backbone, tokens, variants, passes=2)
    kept = 2 * depth if keys else depth + (Needs.FINAL in method.needs)
    shape = (batch, kept * tokens + 1, backbone.config.width)
    rows = torch.randn(shape, device=workload.device).half()

    def logits() -> Iterable[Tensor]:
        seen = [rows[:, i : i + tokens].float() for i in range(0, rows.shape[1] - 1, tokens)]
        final = seen[-1] if kept == depth + 1 else None
        layers = keys_values(seen, backbone) if keys else seen[:depth]
        cached = Cached(rows[:, -1].float(), layers, final)
        return model.from_cache(cached, list(model.tasks)).outputs().values()

    return make_step(logits, [t.parameters() for t in model.tasks.values()], workload.labels(batch))


def _engram_step(workload: Workload, batch: int, through_backbone: bool = False) -> Step:
    """One training step; `through_backbone` keeps the activations as if nothing were frozen."""
    model, pixels = workload.model(1), workload.pixels(batch).requires_grad_(through_backbone)
    task = model.task("task0")

    def logits() -> Iterable[Tensor]:
        pixels.grad = None
        return [model(pixels, tasks=["task0"])["task0"]]

    return make_step(logits, [task.parameters()], workload.labels(batch))


def peer_step(workload: Workload, batch: int, peer: Peer) -> Step:
    pixels = workload.pixels(batch)
    return make_step(lambda: [peer.one_pass(pixels)], [peer.trained()], workload.labels(batch))


def make_step(
    logits: Callable[[], Iterable[Tensor]],
    parameters: Sequence[Iterable[nn.Parameter]],
    labels: Tensor,
) -> Step:
    """Forward, backward, clip and update, for each task by its logits and parameters.

    All use the optimiser of the default recipe.
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


@dataclass(frozen=True)
class BenchSettings:
    """Settings of `engram bench`; it takes about `seconds` for each batch size of either table."""

    backbone: str | None = None  # pico
    shape: str | None = None  # with random weights, in place of a backbone
    tasks: Sequence[int] = (1, 10, 100)
    batches: Sequence[int] = (1, 16)
    cells: int = Masked().cells
    seconds: float = 5.0
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.backbone and self.shape:
            raise EngramError(
                f"Both {self.backbone!r} and the shape {self.shape!r} were given; give one."
            )
        for what, numbers in (("--tasks", self.tasks), ("--batch", self.batches)):
            if not numbers or min(numbers) < 1:
                given = ",".join(map(str, numbers))
                raise EngramError(
                    f"{what} is {given!r}; give whole numbers from 1 on, such as 1,10."
                )
        if not self.seconds > 0:
            raise EngramError(f"--seconds is {self.seconds:g}; give a number above 0, such as 5.")


def bench(settings: BenchSettings, say: Say = lambda text: None) -> Description:
    """Measure forward passes and training steps."""
    if settings.shape:
        vit = backbone_of_shape(settings.shape)
    else:
        vit = load_backbone(settings.backbone or "pico")
    vit.to(device_for(settings.device))
    workload = Workload(vit, cells=settings.cells, seconds=settings.seconds, most=100_000)
    found = {
        "forward": forward(workload, settings.tasks, settings.batches, say),
        "training": [row for batch in settings.batches for row in training(workload, batch, say)],
    }
    about = machine()
    document = {
        "machine": about,
        "device": str(workload.device),
        "backbone": vit.source,
        "cells": workload.cells,
        **{name: [row.to_dict() for row in rows] for name, rows in found.items()},
    }
    rows = [
        ("machine", describe_machine(about)),
        ("device", str(workload.device)),
        ("backbone", vit.source),
        ("cells", str(workload.cells)),
        ("ratio", "to the plain backbone's forward pass for the same images, median and quartiles"),
    ]
    columns = ("measured", "tasks", "batch", "ms", "ratio", "quartiles", "by FLOPs", "")
    table = tuple(row.to_row(name) for name, rows in found.items() for row in rows)
    return Description(document, rows, columns, table)
