"""The result of a run is a document that JSON can hold, in the order that `--json` promises."""

import json
from dataclasses import replace
from pathlib import Path

from engram.train.result import Result

RESULT = Result(
    task="t",
    regime="masked",
    parameters=12,
    seconds=1.23456,
    metrics={"val": {"accuracy": 0.5}},
    path=Path("a") / "t.safetensors",
    unreadable={"x.png": "x.png: the file is empty"},
    history=[{"step": 1, "loss": 2.0}],
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
    }
    assert list(document) == ["task", "path", "regime", "parameters", "seconds", "metrics"]


def test_a_task_that_was_trained_in_memory_has_no_path() -> None:
    result = replace(RESULT, path=None)
    assert result.to_dict()["path"] is None
