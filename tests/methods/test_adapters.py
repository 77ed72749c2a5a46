"""adapters.py: all tasks' adapters run batched, each on the tokens of its own task only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.strategies import Node, attach_graph, scatter, some_pixels, tiny_backbone
from torch import Tensor
from torch.nn import functional as F

from engram import MemoryViT
from engram.methods.adapters import AdapterBank, Adapters, PaddedAdapters, layer_adapters


def random_adapters(depth: int, width: int, seed: int = 1) -> Adapters:
    generator = torch.Generator().manual_seed(seed)
    shapes = (depth, 2, 8, width), (depth, 2, width, 8)
    return Adapters(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))


def one_by_one(
    x: Tensor, normed: Tensor, members: list[tuple[range, Adapters]], layer: int, place: int
) -> Tensor:
    x = x.clone()
    for span, adapters in members:
        for row in span:
            middle = F.gelu(normed[:, row] @ adapters.down[layer, place])
            x[:, row] = x[:, row] + middle @ adapters.up[layer, place]
    return x


@settings(max_examples=40)
@given(
    tasks=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 2])), min_size=1),
    start=st.integers(0, 2),
)
def test_batched_adapters_are_adapters_one_by_one(tasks: list[tuple[int, int]], start: int) -> None:
    """Tasks of (tokens, adapter width), 0 for none, behind `start` tokens of the backbone."""
    members, s = [], 0
    for i, (tokens, width) in enumerate(tasks):
        if width:
            adapters = random_adapters(2, width, seed=i)
            members.append((range(s, s + tokens), adapters))
        s += tokens
    assume(members)
    x, normed = torch.randn(2, 3, start + s, 8, dtype=torch.float64)
    bank = AdapterBank(members, s)
    behind = [(range(span.start + start, span.stop + start), own) for span, own in members]
    for adding in (bank, PaddedAdapters.create(members, 2, x)):
        adapt = layer_adapters(adding, 1, start)
        assert adapt is not None
        for place in (0, 1):
            wanted = one_by_one(x, normed, behind, 1, place)
            torch.testing.assert_close(adapt(x, normed, place), wanted)


def test_the_input_is_left_as_it_was() -> None:
    adapters = random_adapters(1, 2)
    x, normed = torch.randn(2, 1, 3, 8, dtype=torch.float64)
    before = x.clone()
    AdapterBank([(range(1, 2), adapters)], 3).add(x, normed, 0, 0)
    assert torch.equal(x, before)


def test_adapters_start_as_nothing() -> None:
    model, pixels = MemoryViT(tiny_backbone()), some_pixels()
    for name, regime in (("plain", "masked"), ("adapted", "masked+adapter")):
        scatter(model.add_task(name, 3, regime=regime, seed=0).head)
    with torch.no_grad():
        logits = model(pixels)
    torch.testing.assert_close(logits["plain"], logits["adapted"])
    x, normed = torch.randn(2, 1, 3, 8)
    assert torch.equal(PaddedAdapters.create([], 1, x).add(x, normed, 0, 0), x)


def test_adapters_of_one_shape_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 tasks cost as many products a layer as one."""
    products: list[int] = []
    real = F.gelu

    def counted(x: Tensor, **options: str) -> Tensor:
        products.append(len(x))
        return real(x, **options)

    model = MemoryViT(tiny_backbone(torch.float32, activation="quick_gelu"))
    attach_graph(model, [Node(adapter=2)] * 20)
    monkeypatch.setattr(F, "gelu", counted)
    with torch.no_grad():
        model(some_pixels(dtype=torch.float32))
    assert products == [20] * 2 * len(model.backbone.layers)


def test_only_the_tasks_own_stream_passes_through_its_adapters() -> None:
    model, pixels = MemoryViT(tiny_backbone()), some_pixels()
    attach_graph(model, [Node(adapter=2), Node(), Node(adapter=2), Node((0,)), Node(adapter=1)])
    with torch.no_grad():
        before = model(pixels, exact=True)
        scatter(model.task("task0").adapters)
        after = model(pixels, exact=True)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"task0", "task3"}  # and what extends it
