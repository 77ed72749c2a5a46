"""One task's parameters: what a regime gives it, and how they start."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.adapters import Adapters
from engram.errors import EngramError
from engram.side import Side
from engram.tasks.class_statistics import ClassStatistics
from engram.tasks.heads import Settled
from engram.tasks.kinds import Kind
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec
from engram.util.spelling import spell
from engram.util.tensors import version
from engram.vit import ViT


class Task(nn.Module):
    """One task's parameters, named as in its file: cells, class_token, head.weight, head.bias.

    Cells are drawn from N(0, 0.02^2), and those of side patches, which are narrow, from N(0, 1).
    The class token starts as a copy of the trunk's own (`class_init="trunk"`; the paper does not
    say), or from N(0, 0.02^2) where the trunk has none or with `class_init="random"`. Draws come
    from torch's global generator.
    """

    def __init__(self, spec: TaskSpec, trunk: ViT, class_init: str = "trunk") -> None:
        super().__init__()
        if class_init not in ("trunk", "random"):
            raise EngramError(
                f"{spell('class_init')} is {class_init!r}; choose 'trunk' or 'random'."
            )
        shape = TrunkShape.of(trunk)
        parts, shapes = spec.parts, spec.shapes(shape)
        if not parts.cells:
            spec = replace(spec, cells=0)
        if parts.moments:
            spec = replace(spec, layers=spec.layers_read(shape))
        self.spec = spec
        self.cells = self.class_token = self.adapters = self.side = self.trunk = None
        if parts.cells:
            self.cells = nn.Parameter(torch.randn(shapes["cells"]) * (1 if parts.side else 0.02))
        if parts.token:
            token = (torch.randn(shapes["class_token"]) * 0.02).to(trunk.device, trunk.dtype)
            if class_init == "trunk" and trunk.class_token is not None:
                token[:1] = trunk.class_token.detach()
                token[1:] += trunk.class_token.detach()  # apart from each other, so they differ
            self.class_token = nn.Parameter(token)
        if parts.adapters:
            depth, _, width, bottleneck = shapes["adapters.down"]
            self.adapters = Adapters(depth, width, bottleneck)
        if parts.side:
            steps, width, rank = shapes["side.project"]
            self.side = Side(steps, width, rank, len(spec.extends), spec.queries)
        if parts.trunk:
            if trunk.stored != "fp32":
                raise EngramError(
                    f"The regime {spec.regime} trains the trunk itself, whose weights are in "
                    f"{trunk.stored}; load it in fp32 ({spell('trunk_dtype', 'fp32')})."
                )
            self.trunk = copy.deepcopy(trunk)
            self.trunk.head = None
            self.trunk.requires_grad_(True)
        self.head = spec.does.head(
            spec.features(shape), len(spec.classes), mlp=parts.mlp, masked=parts.masked
        )
        self.statistics: ClassStatistics | None = None  # `keep_statistics` makes room for them
        self.to(trunk.device, trunk.dtype)
        self._settled: tuple[object, Settled] = (None, {})

    @property
    def kind(self) -> Kind:
        """What it learns from and answers; `kind.name` is the word for it."""
        return self.spec.does

    def keep_statistics(self) -> ClassStatistics:
        """New ones of what its head is given, which are part of the task from now on."""
        groups = self.kind.groups(len(self.spec.classes))
        self.statistics = ClassStatistics(groups, self.head.in_features).to(self.head.weight.device)
        return self.statistics

    def answer(self, output: Tensor, top_k: int = 5) -> Any:
        """The answer for one image, from its row of `model(pixels)[name]`, as JSON can hold it.

        The `answer` of each kind in `kinds.py` says what it contains.
        """
        settled = self.head.settled
        if not output.is_cpu:
            return self.kind.answer(output, self.spec.classes, settled, top_k)
        state = tuple(map(version, settled.values()))
        if self._settled[0] != state:  # fetched once: for every image, a GPU would be waited for
            self._settled = state, {name: value.cpu() for name, value in settled.items()}
        return self.kind.answer(output, self.spec.classes, self._settled[1], top_k)

    def tensors(self) -> dict[str, Tensor]:
        """What the task's file holds: all that was trained, and what was found in the data."""
        found = {f"head.{name}": value for name, value in self.head.settled.items()}
        found |= {} if self.statistics is None else self.statistics.tensors()
        return {name: t.detach() for name, t in (*self.named_parameters(), *found.items())}
