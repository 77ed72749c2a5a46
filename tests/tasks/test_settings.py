"""The settings of a new task reach its spec, and have the same defaults."""

from dataclasses import MISSING, fields

from engram.tasks.regimes import REGIMES, UPDATES
from engram.tasks.settings import TaskSettings
from engram.tasks.spec import TaskSpec


def test_every_setting_reaches_the_spec() -> None:
    settings = TaskSettings("memory", 7, (), "add", 9, "random")
    spec = TaskSpec.create("t", 3, settings)
    assert (spec.regime, spec.cells, spec.update, spec.adapter_width) == ("memory", 7, "add", 9)
    side = TaskSpec.create("t", 3, TaskSettings("side", rank=8))
    assert (side.regime, side.rank) == ("side", 8)
    masked = TaskSpec.create("t", 3, TaskSettings().with_parents(["a", "b", "a"]))
    assert masked.extends == ("a", "b")


def test_parents_change_nothing_else() -> None:
    settings = TaskSettings(cells=3, regime="masked+adapter")
    extended = settings.with_parents(["a"])
    assert extended.extends == ("a",)
    assert extended.with_parents([]) == settings


def test_defaults_are_those_of_the_spec() -> None:
    spec = {item.name: item.default for item in fields(TaskSpec) if item.default is not MISSING}
    both = [item for item in fields(TaskSettings) if item.name in spec]
    assert len(both) == 6
    assert {item.name: item.default for item in both} == {
        item.name: spec[item.name] for item in both
    }


def test_choices_are_what_there_is() -> None:
    choices = {item.name: item.metadata["choices"] for item in fields(TaskSettings)}
    assert choices["regime"] == tuple(REGIMES)
    assert choices["update"] == UPDATES
