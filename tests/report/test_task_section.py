"""The section of one task: facts, and a split that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.engrams import familiar
from tests.support.regimes import SUPERVISED, known
from tests.support.reports import answered, model_with, noise, write_page

from engram.inference.evaluate import Answers
from engram.methods import METHODS, LearnedPooling, Side
from engram.report.contents import Facts, Text
from engram.report.task_section import TaskPart, task_section


@pytest.mark.parametrize("regime", SUPERVISED)
def test_every_regime_has_a_page(tmp_path: Path, regime: str) -> None:
    model, answers = answered(noise(6, "ab"), regime=regime)
    html, found = write_page(tmp_path / "r.html", model, answers)
    assert "attention-t" in found.ids
    assert ("shares-t" in found.ids) == (
        not issubclass(METHODS[regime], (Side, LearnedPooling))
    )  # one map
    assert f"class=chosen><td class=words>{regime}</td>" in html


def test_facts_are_those_of_the_task() -> None:
    model, answers = answered(noise(6, "ab"), cells=3)
    facts = task_section(model, TaskPart(answers)).contents[1]
    assert isinstance(facts, Facts)
    given = dict(facts.pairs)
    assert given["images"] == "6"
    assert given["classes"] == "2"
    assert given["cells per layer"] == "3"
    assert given["parameters"] == f"{sum(p.numel() for p in model.task('t').parameters()):,}"
    assert given["test accuracy"] == answers.kind.shown(answers.metrics()["accuracy"])


def test_facts_say_what_a_regime_gives_the_task() -> None:
    sizes = {
        "side": {"cells per layer": "3", "rank of its side network": "4"},
        "readout": {"layers its head sees": "5"},
    }
    sizes["side+readout"] = {**sizes["side"], **sizes["readout"]}
    for regime, expected in sizes.items():
        model, answers = answered(noise(6, "ab"), regime=regime, **known(regime, cells=3, rank=4))
        facts = task_section(model, TaskPart(answers)).contents[1]
        assert isinstance(facts, Facts)
        words = ("cells", "rank", "layers")
        given = {name: value for name, value in facts.pairs if name.startswith(words)}
        assert given == expected


def test_familiarity_of_the_images_is_a_sentence() -> None:
    model, answers = answered(noise(6, "ab"))
    contents = task_section(model, TaskPart(answers)).contents
    said = [one.text for one in contents if isinstance(one, Text)]
    assert not any("Familiarity" in text for text in said)
    familiar(model.task("t"))
    contents = task_section(model, TaskPart(answers)).contents
    said = [one.text for one in contents if isinstance(one, Text)]
    assert any("Familiarity of 6 images" in text for text in said)


def test_a_split_that_cannot_be_read_still_has_a_page(tmp_path: Path) -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    none = Answers("t", noise(3, "ab"), torch.zeros(0, 2), nothing, nothing, ["x.png", "y.png"])
    html, found = write_page(tmp_path / "r.html", model_with("ab"), none)
    assert "unreadable" in html
    assert "confusion-t" not in found.ids
