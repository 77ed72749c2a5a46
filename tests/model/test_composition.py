"""Tasks are added, attached, detached and replaced beside each other."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.support.errors import refuses
from tests.support.strategies import MIXED, model_of, name_of, tiny_backbone
from torch import Tensor

from engram import MemoryViT, random_backbone
from engram.methods import Readout


def test_tasks_stay_the_same_while_others_are_detached_and_attached_again(pixels: Tensor) -> None:
    model = model_of(MIXED)
    with torch.no_grad():
        before = model(pixels, exact=True)
        removed = {name: model.engram(name) for name in reversed(list(model.tasks))}
        for name in removed:
            model.detach(name)
            after = model(pixels, exact=True)
            assert all(torch.equal(after[left], before[left]) for left in ("base", *model.tasks))
        for name in reversed(removed):
            model.attach(removed[name])
        again = model(pixels, exact=True)
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_a_task_can_take_the_place_of_another(pixels: Tensor) -> None:
    model = model_of(MIXED)
    with torch.no_grad():
        before, readout = model(pixels, exact=True), model.task("task5").spec
        task = model.swap(replace(readout, method=Readout(layers=1)))
        assert list(model.tasks) == [name_of(i) for i in range(len(MIXED))]
        assert task.head.weight.shape == (3, 3 * 8)
        after = model(pixels, exact=True)
    assert torch.equal(after["task5"], torch.zeros(3, 3))
    assert all(torch.equal(after[name], before[name]) for name in before if name != "task5")


def test_extends_as_a_text_is_refused(family: MemoryViT) -> None:
    with refuses("extends is the text 'task0'"):
        family.add_task("roses", 3, extends="task0")


def test_a_task_may_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = MemoryViT(tiny_backbone()).eval()
        model.add_task("a", 3)
        assert model(torch.zeros(2, 3, 8, 8).double())["a"].shape == (2, 3)


def test_a_line_describes_a_model() -> None:
    model = MemoryViT(random_backbone(image_size=8, patch=4, width=8, depth=1, heads=2, classes=0))
    assert repr(model).endswith("8 x 8 pixels, 1,328 parameters; tasks: none)")
    model.add_task("pets", 2)
    model.add_task("tiny", 2, regime="head")
    assert repr(model).endswith("; tasks: pets (masked), tiny (head))")
