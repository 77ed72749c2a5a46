"""The demo, end to end but small: what it writes, prints and proves."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from engram.backbones.load import load_backbone
from engram.cli.main import main
from engram.experiments.demo import Demo, DemoSize, run_demo
from engram.experiments.demo_output import DEMO
from engram.inference.engine import load_model
from engram.util.invocation import program

TINY = DemoSize(digits=40, digits_epochs=1, scenes=40, scenes_epochs=1, test=40, rounds=1)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One small demo for all tests: its folder, its results, its story."""
    folder = tmp_path_factory.mktemp("out") / "demo"
    story = StringIO()
    results = run_demo(folder, size=TINY, console=Console(file=story, width=100))
    return folder, results, story.getvalue()


def test_results_say_what_the_demo_found(ran: tuple[Path, dict[str, Any], str]) -> None:
    folder, results, _ = ran
    assert json.loads((folder / "results.json").read_text()) == results
    assert set(results["accuracies"]) == {"digits", "shape", "count"}
    assert all(0 <= value <= 1 for value in results["accuracies"].values())
    assert results["base_identical"] is True
    assert set(results["costs"]) == {"digits", "shape", "count"}
    assert all(0 < cost["share"] < 0.05 for cost in results["costs"].values())
    assert results["costs"]["count"]["macs"] > results["costs"]["shape"]["macs"]  # it reads more
    assert results["seconds"] > 0
    assert results["passes"]["ratio"] > 1
    assert set(results["picture"]["answers"]) == {"base", "digits", "shape", "count"}


def test_with_the_mask_other_tasks_change_nothing(ran: tuple[Path, dict[str, Any], str]) -> None:
    found = ran[1]["without_mask"]
    assert [step["beside"] for step in found["steps"]] == [[], ["shape"], ["shape", "count"]]
    assert {step["with_mask"] for step in found["steps"]} == {ran[1]["accuracies"]["digits"]}
    assert found["steps"][0]["without_mask"] == found["steps"][0]["with_mask"]
    assert 0 <= found["base_answers_changed"] <= 1


def test_the_bundle_answers_and_leaves_base_alone(ran: tuple[Path, dict[str, Any], str]) -> None:
    model = load_model(ran[0] / "bundle").eval()
    assert model.task("count").spec.extends == ("shape",)
    pixels = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        logits = model(pixels, exact=True)
        assert torch.equal(logits["base"], load_backbone("pico").eval()(pixels))
    assert {name: values.shape[1] for name, values in logits.items()} == {
        "base": 10,
        "digits": 10,
        "shape": 5,
        "count": 4,
    }


def test_the_story_is_told_in_order(ran: tuple[Path, dict[str, Any], str]) -> None:
    story, at = ran[2], 0
    for part in ("One frozen ViT", "digits", "shape", "count", "Composed", "one pass",
                 "bit for bit", "One pass for all", "Without the mask", "report.html",
                 "engram fit photos"):  # fmt: skip
        at = story.find(part, at)
        assert at >= 0, part
    last = " ".join(story.splitlines()[-1].split())
    assert last == f"{program()} fit photos --task pets -o pets.safetensors"


def test_only_what_is_listed_is_left_behind(ran: tuple[Path, dict[str, Any], str]) -> None:
    folder, results, _ = ran
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == set(results["files"])
    assert {"report.html", "results.json", "bundle/bundle.json"} <= there
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]


def test_json_is_the_results_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Demo, "run", lambda demo: {"what": DEMO})
    assert main(["demo", "--out", str(tmp_path / "demo"), "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == json.loads((tmp_path / "demo" / "results.json").read_text())


def test_help_names_the_demo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engram", "demo", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--out" in done.stdout
