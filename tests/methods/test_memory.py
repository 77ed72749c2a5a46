"""Who reads whom, and what the cells of a task cost. test_passes.py has the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import reference
from tests.support.strategies import (
    DIAMOND,
    Node,
    as_reference,
    graphs,
    model_of,
    name_of,
    some_pixels,
)
from torch import Tensor

from engram.vit.layers import Block


@settings(max_examples=25)
@given(nodes=graphs(least=2), data=st.data())
def test_a_task_is_moved_by_those_it_extends_and_by_no_other(
    nodes: list[Node], data: st.DataObject
) -> None:
    model, pixels = model_of(nodes, dtype=torch.float64), some_pixels(1)
    moved = name_of(data.draw(st.integers(0, len(nodes) - 1)))
    readers = {n for n in model.tasks if moved in reference.ancestors(n, as_reference(model))}
    with torch.no_grad():
        before = model(pixels, exact=True)
        model.task(moved).class_token[:, ::2].add_(1)  # a constant for all would be normed away
        after = model(pixels, exact=True)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == readers | {moved}


@settings(max_examples=25)
@given(nodes=graphs(least=2), data=st.data(), exact=st.booleans())
def test_asking_for_some_tasks_computes_those_and_what_they_read(
    nodes: list[Node], data: st.DataObject, exact: bool
) -> None:
    model, pixels = model_of(nodes), some_pixels(1, dtype=torch.float32)
    asked = [name_of(data.draw(st.integers(0, len(nodes) - 1)))]
    needed = set(asked) | reference.ancestors(asked[0], as_reference(model))
    for name in set(model.tasks) - needed:
        with torch.no_grad():
            for parameter in model.task(name).parameters():
                parameter.fill_(torch.nan)
    rows: list[int] = []
    for block in model.backbone.layers:
        block.register_forward_pre_hook(lambda block, args: rows.append(args[0].shape[1]))
    with torch.no_grad():
        logits = model(pixels, tasks=asked, exact=exact)
    assert list(logits) == asked
    assert logits[asked[0]].isfinite().all()
    own = sum(nodes[i].tokens for i in range(len(nodes)) if name_of(i) in needed)
    if exact:
        assert sum(rows) == (5 + own) * len(model.backbone.layers)
    else:
        assert rows == [5 + own] * len(model.backbone.layers)


def test_cells_ask_no_queries_and_cost_no_row() -> None:
    rows = []
    for cells in (0, 3):
        model = model_of([Node(cells=cells)])
        seen: list[int] = []
        for block in model.backbone.layers:
            block.mlp.register_forward_pre_hook(
                lambda mlp, args, seen=seen: seen.append(args[0].shape[1])
            )
        with torch.no_grad():
            model(some_pixels(1, dtype=torch.float32))
        rows.append(seen)
    assert rows[0] == rows[1]


def test_keys_and_values_of_cells_are_made_once_a_pass_not_once_an_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(DIAMOND)
    rows: list[int] = []
    real = Block.keys_values

    def counted(block: Block, normed: Tensor, *rotation: Any) -> tuple[Tensor, Tensor]:
        rows.append(normed.shape[0] * normed.shape[1])
        return real(block, normed, *rotation)

    monkeypatch.setattr(Block, "keys_values", counted)
    with torch.no_grad():
        model(some_pixels(16, dtype=torch.float32))
    assert rows == [sum(node.cells for node in DIAMOND)] * len(model.backbone.layers)
