"""Short trainings of all trials, a whole one of the best; rates at the ends wait for a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.runs.run import Run
from engram.train.search.screening import Screening, Trial
from engram.util.processes import ProcessGroup

RECIPE = Recipe(epochs=12, steps=40, batch=16, workers=0, evaluations=20, patience=20)
NOTHING = 1e-50  # a rate that moves no weight
Screen = Callable[..., Screening]


@pytest.fixture
def screen(model: MemoryViT, splits: Splits) -> Screen:
    """Screen trials: the regime of each, its rate, and whether it waits."""

    def screen(*wanted: tuple[str, float, bool], to_beat: float = 0.0) -> Screening:
        trials = []
        for i, (regime, lr, waits) in enumerate(wanted):
            names = (f"{i}-{regime}", f"{i}-scout-{regime}")
            for name in names:
                model.add_task(name, splits.classes, 2, regime=regime, seed=0)
            task, scout = (TaskTrainer(model, name, RECIPE.but(lr=lr)) for name in names)
            trials.append(Trial([task], scout, waits))
        held = splits.with_validation()
        training = Screening(model, trials, held, RECIPE, Run(None, ProcessGroup()))
        training.to_beat = to_beat
        training.prepare()
        training.begin("")
        training.go()
        training.end()
        return training

    return screen


def epochs(training: Screening) -> list[float]:
    """For how many epochs each trial was trained; 0 where it waited to the end."""
    return [one.epochs for one in training.trials.values()]


def test_the_best_is_trained_from_the_beginning(screen: Screen) -> None:
    training = screen(("masked", NOTHING, False), ("side", 0.003, False), ("side", NOTHING, False))
    assert epochs(training) == [2.0, 10.0, 2.0]
    assert [one.dropped for one in training.trials.values()] == [True, False, True]
    assert all("accuracy" in one.metrics for one in training.trials.values())
    assert training.names == ["1-side"]
    trainable = [p for p in training.model.parameters() if p.requires_grad]
    assert len(trainable) == len(training.trainers[0].parameters)


def test_a_rate_waits_until_the_one_beside_it_is_the_best(screen: Screen) -> None:
    training = screen(
        ("masked", NOTHING, True),  # beside one that is not the best
        ("masked", NOTHING, False),
        ("side", 0.003, False),
        ("side", 0.01, True),
    )
    assert epochs(training)[:2] == [0.0, 2.0]
    assert sorted(epochs(training)[2:]) == [2.0, 10.0]


def test_a_trial_far_behind_what_there_is_ends_the_search(screen: Screen) -> None:
    training = screen(("masked", NOTHING, False), ("side", NOTHING, True), to_beat=2.0)
    assert epochs(training) == [2.0, 0.0]
    assert all(one.dropped for one in training.trials.values())


def test_a_scout_whose_rate_is_too_high_is_not_followed(screen: Screen) -> None:
    training = screen(("masked", 1e30, False), ("masked", 0.003, False))
    assert epochs(training) == [0.0, 10.0]
    with pytest.raises(EngramError, match="use a lower one"):
        screen(("side", 1e30, False), ("side", 1e31, False))


def test_scouts_that_diverge_one_after_the_other_are_a_sentence(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at every validation, until none is left."""
    monkeypatch.setattr(Screening, "_diverged", lambda self: list(self.trainers[:1]))
    with pytest.raises(EngramError, match="use a lower one"):
        screen(("side", 0.001, False), ("side", 0.003, False))
