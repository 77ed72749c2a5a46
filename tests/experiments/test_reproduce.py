"""`engram reproduce`: the paper's rows at small size, interrupted, resumed, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engram import EngramError
from engram.cli import main as cli
from engram.data import load
from engram.experiments.reproduce import ADAPTER_WIDTH, PAPER, TABLES, Reproduction, TableRow
from engram.methods import FullAdapter
from engram.train.recipe import RECIPES

QUICK = RECIPES["paper"].but(steps=4, batch=16, evaluations=1, workers=0, augment="none")


def names(table: str) -> list[str]:
    return [row.name for row in TABLES[table]]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_its_rows_chosen_on_validation_and_tested_once(
    table: str, small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    rows = Reproduction(str(colours), table, QUICK, [0.1, 0.01])
    result = rows.run(load(colours), str(small_backbone), tmp_path / "out")
    assert [row["row"] for row in result.document["rows"]] == names(table)
    for row in result.document["rows"]:
        assert row["lr"] in (0.1, 0.01)
        assert 0 <= row["val"] <= 1
        assert 0 <= row["test"] <= 1
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == result.document
    assert f"| {names(table)[-1]} | " in (tmp_path / "out" / "results.md").read_text()


def test_the_table_of_rates_has_all_of_them_and_a_figure(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    rows = Reproduction(str(colours), "rates", QUICK, [0.1, 0.01])
    found = rows.run(load(colours), str(small_backbone), tmp_path).document
    assert [(row["row"], row["lr"]) for row in found["more"]] == [
        (f"{name} at {rate:g}", rate) for name in names("rates") for rate in (0.01, 0.1)
    ]
    for row in found["rows"]:
        own = [one["val"] for one in found["more"] if one["row"].startswith(row["row"])]
        assert max(own) == pytest.approx(row["val"], abs=1e-6)
    assert (tmp_path / "rates.svg").read_text().count('class="line') == len(names("rates"))


def test_cells_of_others_change_no_masked_answer(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    """Section 4.4: without the mask, a task reads the cells of all."""
    splits, backbone, other = load(colours), str(small_backbone), tmp_path / "other"
    Reproduction(str(colours), "4.4", QUICK, [0.1]).run(splits, backbone, other)
    rows = Reproduction(str(colours), "4.4", QUICK, [0.1], beside=[other, other])
    found = rows.run(splits, backbone, tmp_path / "own").document
    scores = {row["row"]: row["test"] for row in (*found["rows"], *found["more"])}
    assert [name for name in scores if "beside" in name] == [
        f"{name}, beside {others}"
        for name in ("memory-5", "masked-5")
        for others in ("other", "other, other")
    ]
    assert scores["masked-5, beside other, other"] == scores["masked-5"]
    with pytest.raises(EngramError, match="leave it out"):
        Reproduction(str(colours), "2", QUICK, beside=[other])
    empty = Reproduction(str(colours), "4.4", QUICK, [0.1], beside=[tmp_path])
    with pytest.raises(EngramError, match=r"memory-5\.safetensors"):
        empty.run(splits, backbone, tmp_path / "own")


@pytest.mark.filterwarnings("ignore:There is nothing to resume")
def test_a_killed_run_goes_on_where_it_was(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    def run(out: str, progress: Any) -> Any:
        rows = Reproduction(str(colours), "4", QUICK, [0.1])
        backbone = str(small_backbone)
        return rows.run(load(colours), backbone, tmp_path / out, progress=progress).document

    def killed(what: str, *_: object, **__: object) -> None:
        if what.startswith("adapter"):
            raise KeyboardInterrupt

    whole = run("whole", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        run("parts", killed)
    first = (tmp_path / "parts" / "memory-5.safetensors").stat().st_mtime_ns
    trained: list[str] = []
    again = run("parts", lambda what, *_, **__: trained.append(what.partition(":")[0]))
    assert again == whole
    assert set(trained) == {"adapter", "memory+adapter-5"}
    assert (tmp_path / "parts" / "memory-5.safetensors").stat().st_mtime_ns == first


def test_rows_of_another_command_are_refused(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    splits, backbone = load(colours), str(small_backbone)
    Reproduction(str(colours), "2b", QUICK, [0.1]).run(splits, backbone, tmp_path)
    other = Reproduction(str(colours), "2b", QUICK.but(steps=5), [0.1])
    with pytest.raises(EngramError, match="other steps"):
        other.run(splits, backbone, tmp_path)


def test_the_plan_is_the_papers_own_setting_and_needs_no_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["reproduce", "--dataset", "cifar100", "--dry-run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["row"] for row in rows] == list(PAPER["cifar100"])
    assert {row["steps"] for row in rows} == {20_000}
    assert [row["paper"] for row in rows] == [91.8, 85.8, 88.6, 90.9, 91.0, 91.1, 90.9]
    shown = Reproduction("cifar100", seeds=2).plan()
    assert shown.table[0] == ("full", "0.003, 0.01, 0.03, 0.1", "8 x 20,000 steps", "91.8")


def test_an_unknown_table_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--dataset", "cifar100", "--table", "7", "--dry-run"]) == 2
    assert "choose one of 2, 4, poster, 2b" in capsys.readouterr().err


def test_adapters_have_as_many_parameters_as_table_4_counts() -> None:
    width, depth = 768, 12
    assert 4 * width * depth * ADAPTER_WIDTH == 737_280
    assert TableRow(FullAdapter).settings == {"adapter_width": ADAPTER_WIDTH}


def test_help_tells_the_defaults_of_the_papers_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["reproduce", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "default: 20000" in shown
    assert "default: sgd" in shown
