"""Random backbones and random graphs of tasks, for property-based tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import example
from hypothesis import strategies as st
from tests.support import reference, side_reference
from tests.support.reference import RefTask
from tests.support.side_reference import RefSide
from torch import Tensor, nn

from engram import MemoryViT, ViT, random_backbone
from engram.methods import METHODS, LearnedPooling, Side, create_method
from engram.methods.method import Needs
from engram.methods.readout import WithStatistics
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task
from engram.vit.pos_embed import RotaryConfig
from engram.vit.vit import HeadConfig


@dataclass(frozen=True)
class Node:
    """One task of a graph; `extends` holds positions of earlier ones."""

    extends: tuple[int, ...] = ()
    cells: int = 2
    tokens: int = 1
    adapter: int = 0  # width; 0: none
    after_norm: bool = False
    family: str = "masked"  # a regime, without its adapters
    rank: int = 2  # of a side network
    layers: int = 0  # of a readout
    grid: bool = False  # of a readout of all layers
    projected: int = 0  # numbers that a readout is projected to
    queries: int = 2  # of learned pooling
    kind: str = "classification"

    @property
    def regime(self) -> str:
        return f"{self.family}+adapter" if self.adapter else self.family

    def extendable_by(self, other: Node) -> bool:
        mine, theirs = METHODS[self.regime], METHODS[other.regime]
        ranks = not issubclass(mine, Side) or self.rank == other.rank
        return mine.extendable and theirs.extendable and mine.family() is theirs.family() and ranks


@st.composite
def backbone_options(draw: Callable[..., Any]) -> dict[str, Any]:
    """Settings of a tiny backbone: every option that the supported checkpoints need."""
    class_token = draw(st.booleans())
    registers = draw(st.sampled_from([0, 0, 2]))
    prefix = int(class_token) + registers
    pooling = draw(st.sampled_from(["class", "class+mean", "mean"] if class_token else ["mean"]))
    return {
        "heads": draw(st.sampled_from([1, 2])),
        "depth": draw(st.integers(1, 3)),
        "class_token": class_token,
        "registers": registers,
        "prefix_positions": draw(st.integers(0, prefix)),
        "pre_norm": draw(st.booleans()),
        "layer_scale": draw(st.booleans()),
        "final_norm": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "activation": draw(st.sampled_from(["gelu", "quick_gelu", "gelu_tanh", "swiglu"])),
        "positions": draw(st.sampled_from(["learned", "learned", "waves", "none"])),
        "rotary": draw(st.sampled_from([None, None, *ROTARY.values()])),
        "norm": draw(st.sampled_from(["layer", "layer", "rms"])),
        **{name: draw(st.booleans()) for name in ("patch_norm", "read_norm", "mlp_norm")},
        **{name: draw(st.booleans()) for name in ("proj_bias", "mlp_bias")},
        "head": HeadConfig(3, pooling),
    }


#: Rotary positions of DINOv3, EVA-02 and PE.
ROTARY = {
    "dinov3": RotaryConfig(100.0, 4 * math.pi, -2 * math.pi, 0.5, halves=True),
    "eva02": RotaryConfig(10_000.0, 16.0),
    "pe": RotaryConfig(10_000.0, 4.0, offset=1.0, columns_first=True),
}
#: Backbones with the options of a family each.
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "dinov2": {"registers": 2, "prefix_positions": 0, "layer_scale": True},
    "dinov3": {
        "registers": 2,
        "prefix_positions": 0,
        "positions": "none",
        "layer_scale": True,
        "activation": "swiglu",
        "rotary": ROTARY["dinov3"],
    },
    "siglip": {
        "class_token": False,
        "prefix_positions": 0,
        "activation": "gelu_tanh",
        "head": HeadConfig(3, "attention"),
    },
    "aimv2": {
        "class_token": False,
        "prefix_positions": 0,
        "activation": "swiglu",
        "norm": "rms",
        "patch_norm": True,
        **dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), False),
        "head": HeadConfig(0, "attention", pool_mlp_width=0, pool_query=False),
    },
    "aimv2-native": {"class_token": False, "prefix_positions": 0, "positions": "waves"},
    "eva02": {
        "activation": "swiglu",
        "mlp_norm": True,
        "read_norm": True,
        "rotary": ROTARY["eva02"],
    },
    "pe": {
        "pre_norm": True,
        "patch_bias": False,
        "rotary": ROTARY["pe"],
        "head": HeadConfig(3, "attention", pool_heads=4, pool_mlp_width=12),
    },
}
#: Backbones with one option each, or a few.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no class token": {"class_token": False, "prefix_positions": 0},
    "no class position": {"prefix_positions": 0},
    "registers": {"registers": 3, "prefix_positions": 0},
    "registers, class position": {"registers": 3, "prefix_positions": 1},
    "distillation token": {"registers": 1, "prefix_positions": 2},
    "pre-norm": {"pre_norm": True, "patch_bias": False, "activation": "quick_gelu"},
    "layer scale": {"layer_scale": True},
    "swiglu": {"activation": "swiglu", "layer_scale": True},
    "tanh": {"activation": "gelu_tanh"},
    "no qkv bias": {"qkv_bias": False},
    "no final norm": {"final_norm": False},
}


def backbone_with(name: str) -> ViT:
    """A backbone whose every tensor is random, so that nothing hides behind zeros and ones."""
    options = OPTIONS[name]
    pooling = "mean" if options.get("class_token") is False else "class"
    backbone = random_backbone(head=HeadConfig(5, pooling=pooling), **options)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return backbone


def every_family(**given: Any) -> Callable[[Any], Any]:
    """An example of a property-based test for each family, besides what hypothesis draws."""

    def decorated(test: Any) -> Any:
        for options in FAMILY_OPTIONS.values():
            test = example(options=options, **given)(test)
        return test

    return decorated


#: The regimes whose tasks share a pass, as `Node.family` has them; `side` is twice as likely.
SHARING = (
    "masked", "side", "side", "readout", "masked+readout", "masked+adapter+readout", "side+readout",
    "pooling", "head",
)  # fmt: skip


@st.composite
def graphs(
    draw: Callable[..., Any],
    least: int = 1,
    most: int = 5,
    families: Sequence[str] = ("masked",),
) -> list[Node]:
    """Tasks in any mix of concatenation and extension: several parents, chains, diamonds."""
    nodes: list[Node] = []
    for _ in range(draw(st.integers(least, most))):
        node = draw(single_nodes(families))
        able = [i for i, other in enumerate(nodes) if other.extendable_by(node)]
        parents = draw(st.sets(st.sampled_from(able), max_size=3)) if able else set()
        nodes.append(replace(node, extends=tuple(sorted(parents))))
    return nodes


@st.composite
def single_nodes(draw: Callable[..., Any], families: Sequence[str]) -> Node:
    """A task that extends nothing yet."""
    family = draw(st.sampled_from(families))
    if family == "masked":
        return Node(
            cells=draw(st.integers(0, 3)),
            tokens=draw(st.integers(1, 3)),
            adapter=draw(st.sampled_from([0, 0, 1, 2])),
            after_norm=draw(st.booleans()),
        )
    kinds = ["classification", "multilabel", "regression"]
    kinds += ["segmentation"] if METHODS[family].answers_pixels else []
    return Node(
        family=family,
        cells=draw(st.integers(0, 3)),
        rank=draw(st.sampled_from([2, 2, 3])),
        layers=(layers := draw(st.integers(0, 3))),
        grid=(Needs.STATISTICS in METHODS[family].needs) and not layers and draw(st.booleans()),
        projected=draw(st.sampled_from([0, 1, 3])),
        queries=draw(st.sampled_from([1, 2, 3, 9])),
        kind=draw(st.sampled_from(kinds)),
    )


def tiny_backbone(dtype: torch.dtype = torch.float64, **options: Any) -> ViT:
    """A backbone of 4 patches in which no norm, bias or scale is trivial."""
    backbone = random_backbone(**{"image_size": 8, "patch": 4, "width": 8, "heads": 2, **options})
    return scatter(backbone.to(dtype))


def scatter(module: nn.Module, by: float = 0.3, seed: int = 1) -> Any:
    """Move every parameter away from where it starts, zeros too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype), alpha=by)
    return module


def name_of(position: int) -> str:
    return f"task{position}"


def attach_graph(model: MemoryViT, nodes: list[Node], order: list[int] | None = None) -> None:
    """Add the tasks of a graph with random values that depend only on their place in it."""
    for i in order if order is not None else range(len(nodes)):
        task = model.add(spec_of(nodes, i))
        with torch.no_grad():
            for parameter in task.parameters():
                parameter.zero_()
        scatter(task, by=0.5, seed=100 + i)
        with torch.no_grad():
            for name in task.method.half & dict(task.named_parameters()).keys():
                task.get_parameter(name).copy_(task.get_parameter(name).half())
        for fitted in task.head.fitted.values():
            fitted.add_(0.5)


def spec_of(nodes: list[Node], position: int) -> TaskSpec:
    node = nodes[position]
    classes = ("a", "b", "c")[: 2 + position % 2]
    settings = {
        "cells": node.cells,
        "tokens": node.tokens,
        "after_norm": node.after_norm,
        "adapter_width": node.adapter or 32,
        "rank": node.rank,
        "layers": node.layers,
        "grid": node.grid,
        "projected": node.projected,
        "queries": node.queries,
    }
    known = METHODS[node.regime].setting_names()
    return TaskSpec.create(
        name_of(position),
        classes,
        create_method(node.regime, {k: v for k, v in settings.items() if k in known}),
        kind=node.kind,
        extends=[name_of(parent) for parent in node.extends],
    )


#: A parent, two children, a grandchild of both, and two strangers.
FAMILY = [Node(), Node((0,)), Node((0,), 3), Node((1, 2), 0), Node((), 4, 2), Node((), 1, 1, 2)]
#: Two paths to a common ancestor, and a stranger, with other numbers of cells and tokens each.
DIAMOND = [Node(), Node((0,), 3, 2), Node((0,), 0), Node((1, 2), 1, 1, 2), Node((), 1, 3, 1, True)]
#: `FAMILY` with side network.
SIDE_FAMILY = [replace(node, tokens=1, adapter=0, family="side") for node in FAMILY]
#: Parents with other numbers of cells, a grandchild, another rank, and tasks of other regimes.
MIXED = [
    Node(family="side"),
    Node((0,), family="side", cells=3),
    Node((0, 1), family="side", cells=0, kind="segmentation"),
    Node(family="side", rank=3, kind="regression"),
    Node((3,), family="side+readout", rank=3, cells=1, grid=True, projected=2),
    Node(family="readout", layers=2),
    Node(family="readout", kind="multilabel", grid=True),
    Node(),
    Node((7,), 3, 2),
    Node(family="head", kind="segmentation"),
    Node(family="readout", layers=2, projected=3),
    Node(family="masked+readout", layers=1, projected=2),
    Node((7,), family="masked+adapter+readout", cells=2, grid=True),
    Node(family="pooling", queries=2),
    Node(family="pooling", queries=3, kind="regression"),
]


def model_of(
    nodes: list[Node],
    order: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> MemoryViT:
    """A small model with the tasks of a graph."""
    model = MemoryViT(tiny_backbone(dtype, **options)).eval()
    attach_graph(model, nodes, order)
    return model


def ancestors(model: MemoryViT, name: str) -> set[str]:
    """All that a task extends: its parents, their parents, and so on."""
    parents = model.task(name).spec.extends
    return set(parents).union(*(ancestors(model, parent) for parent in parents))


def as_reference(model: MemoryViT) -> list[RefTask]:
    """The attached masked tasks, as the reference takes them: the very same tensors.

    One with a readout has another head: its answer is its class token.
    """
    return [reference_task(task) for task in model.tasks.values() if task.method.streams]


def reference_task(task: Task) -> RefTask:
    tensors = task.input().tensors
    weight, bias = task.head.weight, task.head.bias
    if isinstance(task.method, WithStatistics):
        width = tensors["cells"].shape[-1]
        weight, bias = torch.eye(width).to(weight), bias.new_zeros(width)
    return RefTask(
        task.spec.name,
        tensors["class_token"],
        tensors["cells"],
        weight,
        bias,
        task.spec.extends,
        task.method.settings()["after_norm"],
        tensors.get("adapters.down"),
        tensors.get("adapters.up"),
    )


def reference_side(task: Task) -> RefSide:
    tensors = task.input().tensors
    return RefSide(
        task.spec.name,
        **{name: tensors[f"side.{name}"] for name in ("project", "attention", "up", "down")},
        queries=tensors.get("side.queries"),
        cells=tensors["cells"],
        extends=task.spec.extends,
        parents=tensors.get("side.parents"),
    )


def expected(model: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
    """What the model answers by the references, in double precision."""
    backbone, tasks = model.backbone, as_reference(model)
    answers = [reference.masked(backbone, image, tasks) for image in pixels]
    read = [side_reference.normed_layers(backbone, image) for image in pixels]
    found = {}
    if backbone.head is not None:
        raw, normed = (torch.stack([getattr(a, n) for a in answers]) for n in ("raw", "normed"))
        found["base"] = backbone.head(raw, normed)
    sides = [reference_side(task) for task in model.tasks.values() if isinstance(task.method, Side)]
    rows = [side_reference.climb(layers, sides) for layers in read]
    grid = (pixels.shape[2] // backbone.config.patch, pixels.shape[3] // backbone.config.patch)
    for name, task in model.tasks.items():
        if task.method.streams and not isinstance(task.method, WithStatistics):
            found[name] = torch.stack([answer.logits[name] for answer in answers])
        else:
            tokens = [answer.logits.get(name) for answer in answers]
            each = zip(read, rows, tokens, strict=True)
            outputs = [beside_backbone(model, task, *one, grid) for one in each]
            found[name] = torch.stack(outputs)
            if task.kind.per_pixel:
                found[name] = upsampled(found[name], model, pixels)
    return found


def beside_backbone(
    model: MemoryViT,
    task: Task,
    layers: list[Tensor],
    rows: Mapping[str, list[Tensor]],
    token: Tensor | None,
    grid: tuple[int, int],
) -> Tensor:
    """The output for an image of a task that leaves the backbone alone; `token` is its stream's."""
    spec, vit, final = task.spec, model.backbone, layers[-1]
    if task.kind.per_pixel:
        seen = list(final)
        if isinstance(task.method, Side):
            own = (side_reference.norm(row) for row in rows[spec.name])
            seen = [torch.cat(pair) for pair in zip(final, own, strict=True)]
        patches = torch.stack(seen[vit.config.prefix :])
        return patches @ task.head.weight.T + task.head.bias
    seen_of_image = side_reference.moments(vit, final)[0]
    if Needs.STATISTICS in task.method.needs:
        settings = task.method.settings()
        cells = grid if settings["grid"] else None
        seen_of_image = side_reference.readout(vit, layers, settings["layers"], cells)
        if settings.get("projected"):
            pooled, others = seen_of_image[: vit.config.width], seen_of_image[vit.config.width :]
            seen_of_image = torch.cat([pooled, task.get_parameter("projection") @ others])
    if isinstance(task.method, LearnedPooling):
        taken = []
        for query, values in zip(task.queries, task.values, strict=True):
            weights = torch.softmax(final @ query / len(query) ** 0.5, 0)
            taken.append((weights @ final) @ values)
        seen_of_image = torch.cat([seen_of_image, side_reference.norm(torch.cat(taken))])
    if isinstance(task.method, Side):
        numbers = side_reference.pooled_side(reference_side(task), rows[spec.name], grid)
        width = vit.config.width
        seen_of_image = torch.cat([seen_of_image[:width], numbers, seen_of_image[width:]])
    if token is not None:
        seen_of_image = torch.cat([token, seen_of_image])
    output = task.head.weight @ seen_of_image + task.head.bias
    if task.kind.name == "regression":
        output = output * task.head.std + task.head.mean
    return output


def upsampled(scores: Tensor, model: MemoryViT, pixels: Tensor) -> Tensor:
    """Scores (b, patches, classes) at the size of the pixels."""
    size = (pixels.shape[2], pixels.shape[3])
    grid = [side // model.backbone.config.patch for side in size]
    return F.interpolate(scores.mT.unflatten(2, grid), size, mode="bilinear")


def some_pixels(
    images: int = 2, size: int = 8, dtype: torch.dtype = torch.float64, seed: int = 7
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)
