"""What tasks cost: every ancestor counts, and every regime is compared."""

from __future__ import annotations

from tests.support.regimes import SUPERVISED

import engram
from engram.backbones.shape import BackboneShape
from engram.methods import METHODS
from engram.model import MemoryViT
from engram.report.contents import Table
from engram.report.costs_section import costs_by_task, costs_section
from engram.tasks.costs import task_costs


def three_generations() -> MemoryViT:
    model = MemoryViT(engram.random_backbone())
    model.add_task("a", 2)
    model.add_task("b", 2, extends=["a"])
    model.add_task("c", 2, extends=["b"])
    return model


def test_costs_count_all_ancestors() -> None:
    model = three_generations()
    specs = {name: task.spec for name, task in model.tasks.items()}
    by_hand = task_costs(
        BackboneShape.measure(model.backbone), specs["c"], [specs["a"], specs["b"]]
    )
    assert costs_by_task(model)["c"] == by_hand


def test_the_section_has_all_regimes_and_the_tasks_of_the_page() -> None:
    model = three_generations()
    section = costs_section(model, [task.spec for task in model.tasks.values()])
    regimes, tasks = section.contents
    assert isinstance(regimes, Table)
    assert isinstance(tasks, Table)
    assert [row[0] for row in regimes.rows] == SUPERVISED
    assert regimes.highlighted == SUPERVISED.index("masked")
    assert [row[0] for row in tasks.rows] == ["a", "b", "c"]
    parameters = sum(p.numel() for p in model.task("b").parameters())
    assert tasks.rows[1][2] == f"{parameters:,}"


def test_a_task_that_answers_for_pixels_is_compared_with_those_that_can() -> None:
    model = MemoryViT(engram.random_backbone())
    task = model.add_task("a", 2, kind="segmentation", regime="side", rank=8)
    (regimes,) = costs_section(model, [task.spec]).contents
    assert isinstance(regimes, Table)
    assert [row[0] for row in regimes.rows] == [n for n in SUPERVISED if METHODS[n].answers_pixels]
    assert regimes.highlighted is not None
    assert regimes.rows[regimes.highlighted][0] == "side"
    trained = sum(parameter.numel() for parameter in task.parameters())  # with its rank
    assert f"{trained:,}" in regimes.rows[regimes.highlighted]
    assert regimes.rows[regimes.highlighted][-1] == "yes"  # it shares the pass


def test_one_task_needs_no_second_table() -> None:
    model = three_generations()
    assert len(costs_section(model, [model.task("a").spec]).contents) == 1
