"""What a task is, without its values: a setting that makes no sense is a sentence."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from tests.support.errors import refuses
from tests.support.strategies import tiny_trunk

from engram import EngramError, MemoryViT
from engram.tasks.kinds import KINDS
from engram.tasks.regimes import REGIMES
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec

# Names


@pytest.mark.parametrize("name", ["base", "", "Flowers", "-x", "a b", "../x", "ä", "a" * 65, "a\n"])
def test_a_bad_name_is_refused(family: MemoryViT, name: str) -> None:
    with refuses("cannot name a task: use 1 to 64 of a-z"):
        family.add_task(name, 3)


@pytest.mark.parametrize("name", ["a", "0", "flowers-102", "a.b_c", "a" * 64])
def test_a_good_name_is_taken(name: str) -> None:
    assert MemoryViT(tiny_trunk()).add_task(name, 3).spec.name == name


# Classes


def test_classes_are_a_number_or_names() -> None:
    model = MemoryViT(tiny_trunk())
    assert model.add_task("a", 3).spec.classes == ("0", "1", "2")
    assert model.add_task("b", ["rose", "tulip"]).spec.classes == ("rose", "tulip")
    assert model.add_task("c", np.int64(2)).spec.classes == ("0", "1")
    for classes, problem in {
        0: "it has no classes",
        -1: "it has no classes",
        ("x", "y", "x"): "the class 'x' is there twice",
        "rose": "classes is the text 'rose'",
        2.5: "classes is 2.5; give a whole number or a list of names.",
    }.items():
        with refuses(problem):
            model.add_task("d", classes)  # type: ignore[arg-type]


def test_a_class_that_no_answer_could_name_is_refused() -> None:
    """A folder named in Latin-1, as Python reads it."""
    with pytest.raises(EngramError, match=r"the class 'caf\\udce9' is no text in UTF-8.*rename"):
        TaskSpec("t", ("tea", "caf\udce9"))


def test_many_classes_are_looked_through_once() -> None:
    started = time.process_time()
    with pytest.raises(EngramError, match="the class '29999' is there twice"):
        TaskSpec("t", (*map(str, range(30_000)), "29999"))
    assert time.process_time() - started < 1


# Settings


@pytest.mark.parametrize(
    ("settings_", "problem"),
    [
        ({"regime": "lora"}, "there is no regime 'lora'; choose one of masked, masked+adapter"),
        ({"kind": "detection"}, "there is no kind of task 'detection'"),
        ({"cells": -1}, "cells is -1; it must be a whole number from 0 to 10,000."),
        ({"cells": 2.5}, "cells is 2.5; it must be a whole number from 0 to 10,000."),
        ({"cells": "5"}, "cells is '5'; it must be a whole number"),
        ({"tokens": 0}, "tokens is 0; it must be a whole number from 1 to 10,000."),
        ({"adapter_width": 0}, "adapter_width is 0; it must be"),
        ({"update": "magic", "regime": "memory"}, "there is no update 'magic'"),
        ({"update": "add"}, "update='add' is for the regimes memory and memory+adapter only."),
        ({"update": "add", "regime": "class"}, "update='add' is for the regimes memory and"),
        ({"update": "add", "regime": "side"}, "update='add' is for the regimes memory and"),
        ({"rank": 0, "regime": "side"}, "rank is 0; it must be a whole number from 1 to 10,000."),
        ({"rank": 10_001, "regime": "side"}, "rank is 10001; it must be a whole number from 1 to"),
        ({"tokens": 2, "regime": "side"}, "the regime 'side' has one class token, not 2."),
        ({"tokens": 2, "regime": "memory"}, "the regime 'memory' has one class token, not 2."),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings_: dict[str, Any], problem: str) -> None:
    model = MemoryViT(tiny_trunk())
    with pytest.raises(EngramError, match="Task 'task': " + re.escape(problem)):
        model.add_task("task", 3, **settings_)
    assert not model.tasks


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "detection"}, "there is no kind of task 'detection'; choose one of classif"),
        ({"kind": "segmentation", "classes": 1}, "segmentation needs at least 2 classes, not 1"),
        ({"kind": "segmentation", "classes": 256}, "256 classes are too many for masks"),
        ({"kind": "segmentation", "tokens": 1}, "one class token a class, not 1 for 3"),
        ({"kind": "segmentation", "values": [1, 2]}, "3 classes need as many values in the masks"),
        ({"kind": "segmentation", "values": [1, 2, 2]}, "all different"),
        ({"kind": "segmentation", "values": [0, 1, 9], "ignore": 9}, "not the ignored 9"),
        ({"kind": "segmentation", "values": [0, 1, -1]}, "whole numbers from 0 to 65,535"),
        ({"kind": "regression", "classes": ["age", "age"]}, "the number 'age' is there twice"),
        (
            {"kind": "segmentation", "regime": "readout"},
            "for every pixel; choose side or",
        ),
        ({"kind": "segmentation", "regime": "side+readout"}, "cannot answer for every pixel"),
        ({"values": [0, 1, 2]}, "classification learns from none"),
        ({"classes": ["x" * 5_000_000, "é" * 500_000]}, r"names of its 2 classes take 8\.5 MB"),
    ],
)
def test_what_a_kind_cannot_be_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        MemoryViT(tiny_trunk()).add_task("t", **{"classes": 3} | options)


def test_a_parent_named_twice_is_one_parent(family: MemoryViT) -> None:
    assert family.add_task("x", 3, extends=["task1", "task1"]).spec.extends == ("task1",)


@pytest.mark.parametrize("regime", ["head", "readout", "memory"])
def test_only_masked_and_side_tasks_extend(family: MemoryViT, regime: str) -> None:
    with refuses(f"only masked and side tasks extend others, and its regime is {regime!r}"):
        family.add_task("roses", 3, regime=regime, extends=["task0"])


# Shapes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_the_shapes_of_a_spec_are_those_of_its_task(kind: str, regime: str) -> None:
    if KINDS[kind].per_pixel and REGIMES[regime].moments:
        pytest.skip("a readout answers for no pixel")
    model = MemoryViT(tiny_trunk())
    task = model.add_task("t", 3, 2, kind=kind, regime=regime, adapter_width=4)
    own = {n: tuple(p.shape) for n, p in task.named_parameters() if not n.startswith("trunk.")}
    assert task.spec.shapes(TrunkShape.of(model.trunk)) == own


@pytest.mark.parametrize(("update", "layers"), [("fresh", 2), ("propagate", 1), ("add", 2)])
def test_cells_that_propagate_are_those_of_one_layer(update: str, layers: int) -> None:
    spec = TaskSpec("t", ("a", "b"), regime="memory", update=update, cells=4)
    assert spec.shapes(TrunkShape.of(tiny_trunk(depth=2)))["cells"] == (layers, 4, 8)


@pytest.mark.parametrize(("layers", "read"), [(0, 4), (1, 1), (3, 3), (4, 4), (9, 4)])
@pytest.mark.parametrize("class_token", [True, False])
def test_a_readout_sees_the_last_layers_and_at_most_all(
    layers: int, read: int, class_token: bool
) -> None:
    trunk = tiny_trunk(depth=3, class_token=class_token, prefix_positions=int(class_token))
    spec = TaskSpec("t", ("a", "b"), regime="readout", layers=layers)
    features = read * (3 if class_token else 2) * 8
    assert spec.shapes(TrunkShape.of(trunk)) == {"head.weight": (2, features), "head.bias": (2,)}
    assert MemoryViT(trunk).add(spec).spec.layers == read
