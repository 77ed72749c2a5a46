"""The result of a run is a document that JSON can hold, in the order that `--json` promises."""

import json
from dataclasses import replace
from pathlib import Path

from engram.train.runs.result import Ending, Result

RESULT = Result(
    task="t",
    regime="masked",
    parameters=12,
    seconds=1.23456,
    metrics={"val": {"accuracy": 0.5}},
    path=Path("a") / "t.safetensors",
    unreadable={"x.png": "x.png: the file is empty"},
    history=[{"step": 1, "loss": 2.0}],
    ending=Ending(steps=24, planned=60, per_epoch=2, kept=14, patience=5),
)


def test_a_result_is_a_document() -> None:
    document = json.loads(json.dumps(RESULT.to_dict()))
    assert document == {
        "task": "t",
        "path": "a/t.safetensors",
        "regime": "masked",
        "parameters": 12,
        "seconds": 1.23,
        "metrics": {"val": {"accuracy": 0.5}},
        "training": {
            "steps": 24,
            "planned_steps": 60,
            "steps_per_epoch": 2,
            "epochs": 12.0,
            "kept_step": 14,
            "stopped_early": True,
            "interrupted": False,
        },
        "interrupted": False,
    }
    assert list(document)[:6] == ["task", "path", "regime", "parameters", "seconds", "metrics"]


def test_how_training_ended_is_a_sentence() -> None:
    assert str(RESULT.ending) == (
        "stopped after 12 of 30 epochs (24 steps): no improvement in 5 validations; kept the "
        "weights of step 14, the best on validation"
    )
    assert str(Ending(60, 60, 2, 58, 5)) == (
        "30 epochs (60 steps); kept the weights of step 58, the best on validation"
    )
    assert "(24 steps): interrupted; kept" in str(Ending(24, 60, 2, 14, 5, interrupted=True))
    assert str(Ending(60, 60, 2, 60, 0)) == "30 epochs (60 steps); kept the last weights"


def test_a_task_that_was_trained_in_memory_has_no_path() -> None:
    result = replace(RESULT, path=None)
    assert result.to_dict()["path"] is None


def test_a_line_describes_a_result() -> None:
    line = "Result('t', masked, 12 parameters, val accuracy 0.5, 'a/t.safetensors')"
    assert repr(RESULT) == line
    assert repr(replace(RESULT, path=None)) == line.replace(", 'a/t.safetensors'", "")
