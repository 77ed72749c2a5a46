"""Engrams that fit together, in an order in which they can be attached."""

from __future__ import annotations

import pytest

from engram import EngramError, MemoryViT
from engram.store.engram import in_order


def test_parents_come_first_however_they_are_given(family: MemoryViT) -> None:
    given = [(name, family.engram(name)) for name in reversed(list(family.tasks))]
    names = [engram.spec.name for engram in in_order(given)]
    assert sorted(names) == sorted(family.tasks)
    for engram in in_order(given):
        before = names[: names.index(engram.spec.name)]
        assert set(engram.parents) <= set(before)


def test_a_child_without_its_parent_is_refused_by_name(family: MemoryViT) -> None:
    child = next(name for name in family.tasks if family.task(name).spec.extends)
    parent = family.task(child).spec.extends[0]
    with pytest.raises(EngramError, match=f"child.safetensors extends {parent!r}"):
        in_order([("child.safetensors", family.engram(child))])


def test_no_engrams_are_refused() -> None:
    with pytest.raises(EngramError, match="There are no engrams"):
        in_order([])
