"""Random trunks and random graphs of tasks, for property-based tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from tests.support.reference import RefTask
from torch import Tensor, nn

from engram import MemoryViT, ViT, random_trunk
from engram.tasks.task import Task
from engram.vit import HeadConfig


@dataclass(frozen=True)
class Node:
    """One masked task of a graph; `extends` holds positions of earlier ones."""

    extends: tuple[int, ...] = ()
    cells: int = 2
    tokens: int = 1
    adapter: int = 0  # width; 0: none
    after_norm: bool = False


@st.composite
def trunk_options(draw: Callable[..., Any]) -> dict[str, Any]:
    """Settings of a tiny trunk: every option that the supported checkpoints need."""
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
        "head": HeadConfig(3, pooling),
    }


@st.composite
def graphs(draw: Callable[..., Any], least: int = 1, most: int = 5) -> list[Node]:
    """Tasks in any mix of concatenation and extension: several parents, chains, diamonds."""
    nodes: list[Node] = []
    for i in range(draw(st.integers(least, most))):
        parents = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        nodes.append(
            Node(
                extends=tuple(sorted(parents)),
                cells=draw(st.integers(0, 3)),
                tokens=draw(st.integers(1, 3)),
                adapter=draw(st.sampled_from([0, 0, 1, 2])),
                after_norm=draw(st.booleans()),
            )
        )
    return nodes


def tiny_trunk(dtype: torch.dtype = torch.float64, **options: Any) -> ViT:
    """A trunk of 4 patches in which no norm, bias or scale is trivial."""
    trunk = random_trunk(**{"image_size": 8, "patch": 4, "width": 8, "heads": 2, **options})
    return scatter(trunk.to(dtype))


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
        node = nodes[i]
        task = model.add_task(
            name_of(i),
            classes=2 + i % 2,
            cells=node.cells,
            tokens=node.tokens,
            extends=[name_of(parent) for parent in node.extends],
            regime="masked+adapter" if node.adapter else "masked",
            adapter_width=node.adapter or 32,
        )
        with torch.no_grad():
            for parameter in task.parameters():
                parameter.zero_()
        scatter(task, by=0.5, seed=100 + i)
        task.spec = replace(task.spec, after_norm=node.after_norm)


FAMILY = [Node(), Node((0,)), Node((0,), 3), Node((1, 2), 0), Node((), 4, 2), Node((), 1, 1, 2)]


def model_of(nodes: list[Node], order: list[int] | None = None, **options: Any) -> MemoryViT:
    """A small model with the tasks of a graph."""
    model = MemoryViT(tiny_trunk(torch.float32, **options)).eval()
    attach_graph(model, nodes, order)
    return model


def as_reference(model: MemoryViT) -> list[RefTask]:
    """The attached masked tasks, as the reference takes them: the very same tensors."""
    return [reference_task(task) for task in model.tasks.values()]


def reference_task(task: Task) -> RefTask:
    assert task.class_token is not None
    assert task.cells is not None
    return RefTask(
        task.spec.name,
        task.class_token,
        task.cells,
        task.head.weight,
        task.head.bias,
        task.spec.extends,
        task.spec.after_norm,
        task.adapters.down if task.adapters is not None else None,
        task.adapters.up if task.adapters is not None else None,
    )


def some_pixels(
    images: int = 2, size: int = 8, dtype: torch.dtype = torch.float64, seed: int = 7
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)
