"""What a task is, without its values: a setting that makes no sense is a sentence."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from tests.support.errors import refuses
from tests.support.regimes import class_count, known, teaches
from tests.support.strategies import tiny_backbone

from engram import EngramError, MemoryViT
from engram.backbones.shape import BackboneShape
from engram.methods import METHODS, FullMemory, Readout
from engram.tasks.kinds import KINDS
from engram.tasks.spec import TaskSpec

# Names


@pytest.mark.parametrize("name", ["base", "", "Flowers", "-x", "a b", "../x", "ä", "a" * 65, "a\n"])
def test_a_bad_name_is_refused(family: MemoryViT, name: str) -> None:
    with refuses("cannot name a task"):
        family.add_task(name, 3)


@pytest.mark.parametrize("name", ["a", "0", "flowers-102", "a.b_c", "a" * 64])
def test_a_good_name_is_taken(name: str) -> None:
    assert MemoryViT(tiny_backbone()).add_task(name, 3).spec.name == name


# Classes


def test_classes_are_a_number_or_names() -> None:
    model = MemoryViT(tiny_backbone())
    assert model.add_task("a", 3).spec.classes == ("0", "1", "2")
    assert model.add_task("b", ["rose", "tulip"]).spec.classes == ("rose", "tulip")
    assert model.add_task("c", np.int64(2)).spec.classes == ("0", "1")
    for classes, problem in {
        0: "it has no classes",
        -1: "it has no classes",
        ("x", "y", "x"): "'x' is there twice",
        "rose": "classes is the text 'rose'",
        2.5: "classes is 2.5",
    }.items():
        with refuses(problem):
            model.add_task("d", classes)  # type: ignore[arg-type]


def test_a_class_that_no_answer_could_name_is_refused() -> None:
    """A folder named in Latin-1, as Python reads it."""
    with pytest.raises(EngramError, match="UTF-8"):
        TaskSpec("t", ("tea", "caf\udce9"))


def test_many_classes_are_looked_through_once() -> None:
    started = time.process_time()
    with pytest.raises(EngramError, match="'29999' is there twice"):
        TaskSpec("t", (*map(str, range(30_000)), "29999"))
    assert time.process_time() - started < 1


# Settings


@pytest.mark.parametrize(
    ("settings_", "problem"),
    [
        ({"regime": "lora"}, "no regime 'lora'"),
        ({"kind": "detection"}, "no kind of task 'detection'"),
        ({"cells": -1}, "cells is -1"),
        ({"cells": 2.5}, "cells is 2.5"),
        ({"cells": "5"}, "cells is '5'"),
        ({"tokens": -1}, "tokens is -1"),
        ({"adapter_width": 0, "regime": "adapter"}, "adapter_width is 0"),
        ({"update": "magic", "regime": "memory"}, "update is 'magic'"),
        ({"update": "add"}, "'masked' has no setting 'update'"),
        ({"update": "add", "regime": "class"}, "'class' has no setting 'update'"),
        ({"rank": 0, "regime": "side"}, "rank is 0"),
        ({"rank": 10_001, "regime": "side"}, "rank is 10001"),
        ({"tokens": 2, "regime": "side"}, "'side' has no setting 'tokens'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings_: dict[str, Any], problem: str) -> None:
    model = MemoryViT(tiny_backbone())
    with pytest.raises(EngramError, match=re.escape(problem)):
        model.add_task("task", 3, **settings_)
    assert not model.tasks


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "detection"}, "no kind of task 'detection'"),
        ({"kind": "segmentation", "classes": 1}, "segmentation needs at least 2 classes"),
        ({"kind": "segmentation", "classes": 256}, "256 classes are too many for masks"),
        ({"kind": "segmentation", "tokens": 1}, "one class token a class"),
        ({"kind": "segmentation", "values": [1, 2]}, "need as many values"),
        ({"kind": "segmentation", "values": [1, 2, 2]}, "all different"),
        ({"kind": "segmentation", "values": [0, 1, 9], "ignore": 9}, "not the ignored 9"),
        ({"kind": "segmentation", "values": [0, 1, -1]}, "whole numbers from 0 to 65,535"),
        ({"kind": "regression", "classes": ["age", "age"]}, "'age' is there twice"),
        (
            {"kind": "segmentation", "regime": "readout"},
            "for every pixel",
        ),
        ({"kind": "segmentation", "regime": "side+readout"}, "cannot answer for every pixel"),
        ({"values": [0, 1, 2]}, "classification learns from none"),
        ({"classes": ["x" * 5_000_000, "é" * 500_000]}, "names of its 2 classes"),
    ],
)
def test_what_a_kind_cannot_be_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        MemoryViT(tiny_backbone()).add_task("t", **{"classes": 3} | options)


def test_a_parent_named_twice_is_one_parent(family: MemoryViT) -> None:
    assert family.add_task("x", 3, extends=["task1", "task1"]).spec.extends == ("task1",)


@pytest.mark.parametrize("regime", ["head", "readout", "memory"])
def test_only_masked_and_side_tasks_extend(family: MemoryViT, regime: str) -> None:
    with refuses(f"its regime is {regime!r}"):
        family.add_task("roses", 3, regime=regime, extends=["task0"])


# Shapes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", METHODS)
def test_the_shapes_of_a_spec_are_those_of_its_task(kind: str, regime: str) -> None:
    if not teaches(regime, kind):
        pytest.skip("the regime teaches no such task")
    model = MemoryViT(tiny_backbone())
    task = model.add_task(
        "t",
        class_count(kind),
        kind=kind,
        regime=regime,
        **known(regime, cells=2, adapter_width=4),
    )
    own = {n: tuple(p.shape) for n, p in task.named_parameters() if not n.startswith("backbone.")}
    assert task.spec.shapes(BackboneShape.measure(model.backbone)) == own


@pytest.mark.parametrize(("update", "layers"), [("fresh", 2), ("propagate", 1), ("add", 2)])
def test_cells_that_propagate_are_those_of_one_layer(update: str, layers: int) -> None:
    spec = TaskSpec("t", ("a", "b"), method=FullMemory(cells=4, update=update))
    assert spec.shapes(BackboneShape.measure(tiny_backbone(depth=2)))["cells"] == (layers, 4, 8)


@pytest.mark.parametrize(("layers", "read"), [(0, 4), (1, 1), (3, 3), (4, 4), (9, 4)])
@pytest.mark.parametrize("class_token", [True, False])
def test_a_readout_sees_the_last_layers_and_at_most_all(
    layers: int, read: int, class_token: bool
) -> None:
    backbone = tiny_backbone(depth=3, class_token=class_token, prefix_positions=int(class_token))
    spec = TaskSpec("t", ("a", "b"), method=Readout(layers=layers))
    features = read * (3 if class_token else 2) * 8
    assert spec.shapes(BackboneShape.measure(backbone)) == {
        "head.weight": (2, features),
        "head.bias": (2,),
    }
    assert MemoryViT(backbone).add(spec).spec.method == Readout(layers=read)
