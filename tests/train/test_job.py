"""One training as the command line describes it."""

from pathlib import Path

import pytest

from engram import EngramError
from engram.data.datasets import Splits
from engram.tasks.task_settings import TaskSettings
from engram.train.backbone import backbone_for
from engram.train.job import Sources, TrainingJob
from engram.train.options import DataOptions, RunOptions
from engram.train.recipe import Recipe
from engram.train.search.sweep import SweepResult
from engram.util.progress import silent
from engram.util.settings import Given
from engram.vit import ViT


def start(**options: object) -> TrainingJob:
    given: Given = {
        DataOptions: {},
        TaskSettings: {},
        Recipe: {"steps": 6, "workers": 0},
        RunOptions: {"backbone": "vit", **options},
    }
    return TrainingJob.start("colours.npz", Path("new.safetensors"), given, silent, print)


def test_the_regime_is_auto_unless_one_is_needed(work: Path) -> None:
    assert start().choose(None, None) == ("auto", 1)
    assert start().choose("side", 2) == ("side", 2)
    assert start().choose(None, 3) == ("masked", 3)
    assert start(recipe="paper").choose(None, None) == ("masked", 1)
    with pytest.raises(EngramError, match="seeds needs one regime"):
        start().choose("auto", 2)
    assert start().choose(None, None, 3) == ("masked", 1)
    with pytest.raises(EngramError, match="soup needs one regime"):
        start().choose("auto", None, 3)


def test_a_soup_is_of_rates_around_the_default(work: Path) -> None:
    result = start().train("new", Path("new.safetensors"), "mlp-head", 1, silent, soup=2)
    assert isinstance(result, SweepResult)
    assert [setting.lr for setting in result.settings] == [0.0015, 0.006]
    assert result.soup is not None
    assert len(result.soup.tried) == 2


def test_it_names_the_tasks_that_will_train_and_trains_one(work: Path) -> None:
    job = start()
    assert [spec.regime for spec in job.specs("new", "auto")] == [
        "masked",
        "masked+adapter",
        "side",
    ]
    result = job.train("new", Path("new.safetensors"), "masked", 1, silent)
    assert (result.regime, result.path) == ("masked", Path("new.safetensors"))
    assert Path("new.run/recipe.toml").exists()


def test_data_and_backbone_may_come_from_elsewhere(work: Path) -> None:
    asked: list[str] = []

    def read(options: DataOptions, data: str) -> Splits:
        asked.append(data)
        return options.load("colours.npz")

    def find(options: RunOptions, splits: Splits, **others: object) -> tuple[ViT, str]:
        asked.append(options.backbone)
        return backbone_for(RunOptions("vit"), splits)

    given: Given = {DataOptions: {}, TaskSettings: {}, Recipe: {}, RunOptions: {"backbone": "mine"}}
    out = Path("new.safetensors")
    TrainingJob.start("kept", out, given, silent, print, Sources(read, find))
    assert asked == ["kept", "mine"]
