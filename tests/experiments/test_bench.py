"""What is measured is the same work, and described in full. No time is judged here."""

import json
from typing import Any

import pytest
import torch

from engram import random_backbone
from engram.backbones.random import backbone_of_shape
from engram.backbones.shape import BackboneShape
from engram.cli.main import main
from engram.errors import EngramError
from engram.experiments.bench import (
    PLAIN,
    BenchSettings,
    Workload,
    bench,
    cached_step,
    forward,
    steps,
)
from engram.experiments.timing import Case, compare, describe_machine, machine, quartiles
from engram.tasks.costs import backbone_macs
from engram.vit import ViT


@pytest.fixture
def backbone() -> ViT:
    return random_backbone(image_size=16, width=16, depth=2, heads=2)


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every optimiser step, whether it changed all the parameters it was given."""
    found: list[bool] = []
    update = torch.optim.AdamW.step

    def step(optimizer: torch.optim.AdamW, *arguments: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        result = update(optimizer, *arguments)
        found.append(not any(map(torch.equal, before, parameters)))
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return found


def run_twice(step: Any) -> None:
    """Heads start at zero, so that the gradient of all else is zero in the first step."""
    step()
    step()


def test_every_step_updates_and_the_frozen_backbone_stays(
    backbone: ViT, updated: list[bool]
) -> None:
    before = backbone.fingerprint
    workload = Workload(backbone, cells=2, classes=3)
    makers = steps(workload, batch=2)
    assert {"engram", "engram, from the cache", "separate model, full"} <= makers.keys()
    for name, make in makers.items():
        run_twice(make())
        assert updated[-1], name
    updated.clear()
    run_twice(cached_step(workload, batch=2, variants=3))
    assert updated[3:] == [True] * 3
    assert backbone.fingerprint == before
    assert not any(p.requires_grad for p in backbone.parameters())


def test_a_shape_has_the_size_of_its_name() -> None:
    assert backbone_macs(BackboneShape.measure(backbone_of_shape("ViT-Ti/32"))) < backbone_macs(
        BackboneShape.measure(backbone_of_shape("ti/16"))
    )
    assert backbone_of_shape("ViT-S/16").config.width == 384
    with pytest.raises(EngramError, match="ViT-B/32"):
        backbone_of_shape("ViT-XXL/3")


def test_the_document_has_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    threads = str(torch.get_num_threads())
    arguments = ["--tasks", "1,3", "--batch", "2", "--cells", "1", "--seconds", "0.001"]
    assert main(["bench", *arguments, "--threads", threads, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["backbone"] == "pico"
    assert {"processor", "cores", "torch", "threads"} <= document["machine"].keys()
    rows = {(row["what"], row["tasks"]): row for row in document["forward"]}
    for what in ("engram", "separate models"):
        assert {(what, 1), (what, 3)} <= rows.keys()
    assert rows[PLAIN, 0]["ratio"] == 1
    assert rows["engram", 3]["limit"] > rows["engram", 1]["limit"] > 1
    assert {row["what"] for row in document["training"]} >= {PLAIN, "engram"}
    for row in (*document["forward"], *document["training"]):
        assert row["seconds"] > 0
        assert row["low"] <= row["ratio"] <= row["high"]


def test_long_loops_are_measured_in_part_and_say_so(backbone: ViT) -> None:
    rows = forward(Workload(backbone, seconds=0, least=1, passes=2), tasks=[5], batches=[1])
    notes = {row.what: row.note for row in rows}
    assert notes["separate models"] == "2 of 5 passes"
    assert notes["engram"] == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tasks", "0"], "from 1 on"),
        (["--batch", "two"], "numbers with commas"),
        (["--threads", "0"], "equal to 1"),
        (["--seconds", "nan"], "give a number above 0"),
        (["--shape", "big"], "ViT-B/32"),
        (["--shape", "ViT-B/32", "--backbone", "pico"], "give one"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_table_is_for_people() -> None:
    described = bench(BenchSettings(tasks=[2], batches=[1], seconds=0.001))
    assert described.columns[:3] == ("measured", "tasks", "batch")
    assert all(len(row) == len(described.columns) for row in described.table)
    rows = {row[0]: row for row in described.table}
    assert rows[PLAIN][1:3] == ("", "1")
    assert rows[PLAIN][4:7] == ("1.00", "1.00 to 1.00", "1.00")
    assert rows["engram"][1:3] == ("2", "1")
    assert float(rows["engram"][6]) > 1
    assert "engram (training)" in rows
    assert dict(described.rows)["backbone"] == "pico"


# Timing


def test_cases_take_turns_and_are_scaled() -> None:
    order: list[str] = []
    cases = {
        "a": Case(lambda: order.append("a")),
        "b": Case(lambda: order.append("b"), runs=2, of=10),
    }
    messages: list[str] = []
    found = compare(cases, seconds=0, least=2, say=messages.append)
    assert order == ["a", "b", *["a", "b", "b"] * 2]
    assert cases["b"].scale == 5
    assert found["a"].ratio == found["a"].low == found["a"].high == 1
    assert found["b"].rounds == len(messages) == 2
    assert found["b"].low <= found["b"].ratio <= found["b"].high


def test_rounds_end_at_the_most() -> None:
    assert compare({"a": Case(lambda: None)}, seconds=60, most=4)["a"].rounds == 4


def test_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


def test_a_case_of_several_short_calls_counts_as_one() -> None:
    assert Case(lambda: None, runs=4, of=1).scale == 0.25
    assert Case(lambda: None, runs=4).scale == 1


def test_the_machine_is_described_in_a_sentence() -> None:
    about = machine()
    text = describe_machine({**about, "processor": "Some CPU", "memory_gb": None, "cores": 3})
    assert text.startswith(f"Some CPU (3 cores, {about['system']}), torch {about['torch']} with ")
    assert "GB" not in text
