"""torch.compile: the same answers and gradients, as one graph, in evaluation and in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.strategies import Node, model_of, scatter, some_pixels
from torch import Tensor, nn

from engram import MemoryViT

#: Side network of rank 4: a norm over two numbers is a sign, and its gradient means nothing.
VARIANTS = {
    "tasks that share a pass": [
        Node(),
        Node((0,), 3, 2),
        Node((), 1, adapter=2),
        Node(family="side", rank=4),
        Node((3,), 3, family="side", rank=4, kind="segmentation"),
        Node(family="readout", layers=1),
    ],
    "a task that changes the backbone": [Node(family="memory+adapter")],
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def answers(model: Any, pixels: Tensor, **options: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(model(pixels, **options))


def learnt(model: MemoryViT, run: Any, pixels: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The outputs in training, and the gradients of every task's parameters."""
    model.train().zero_grad()
    outputs = run(pixels)
    torch.stack([(x**2).sum() for x in outputs.values()]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    return {name: x.detach() for name, x in outputs.items()}, gradients


def check_both(model: MemoryViT, run: Any, pixels: Tensor, close: dict[str, float]) -> None:
    torch.testing.assert_close(answers(run, pixels), answers(model.eval(), pixels), **close)
    torch.testing.assert_close(learnt(model, run, pixels), learnt(model, model, pixels), **close)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_answers_and_learns_the_same_in_one_graph(variant: str) -> None:
    model = model_of(VARIANTS[variant], depth=1).double()
    run = compiled(model, "aot_eager")
    check_both(model, run, some_pixels(3), {"rtol": 1e-9, "atol": 1e-9})


def test_inductor_answers_the_same() -> None:
    """Without gradients, whose kernels take a C++ compiler half a minute."""
    model = model_of([Node()], depth=1).eval()
    pixels, close = some_pixels(2, dtype=torch.float32), {"rtol": 1e-5, "atol": 1e-5}
    found = answers(compiled(model, "inductor"), pixels)
    torch.testing.assert_close(found, answers(model, pixels), **close)


def test_tasks_images_and_weights_may_change_after_compiling() -> None:
    model = model_of([Node()], depth=1)
    run, close = compiled(model, "eager"), {"rtol": 1e-6, "atol": 1e-6}

    def check(images: int = 2, size: int = 8, **options: Any) -> set[str]:
        pixels = some_pixels(images, size, dtype=torch.float32)
        found = answers(run, pixels, **options)
        torch.testing.assert_close(found, answers(model, pixels, **options), **close)
        return set(found)

    assert check() == {"base", "task0"}
    scatter(model.add_task("new", 3, cells=1, extends=["task0"]))
    assert check() == {"base", "task0", "new"}
    scatter(model.task("task0"))
    check(images=3)
    model.detach("new")
    assert check(size=12, exact=True) == {"base", "task0"}
