"""data at the command line: what it prints, that it writes nothing, and how it refuses."""

from pathlib import Path

import pytest
from tests.support.commands import Output, assert_refused, document, run
from tests.support.datasets import write_class_folders


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_class_folders(Path("photos"), {"blue": 3, "red": 3})
    return tmp_path


def test_data_prints_what_is_understood_and_writes_nothing(photos: Path, capsys: Output) -> None:
    before = sorted(photos.rglob("*"))
    assert run("data", "photos") == 0
    printed = capsys.readouterr().out
    for part in ("classification, 2 classes", "train 6; the data has no splits", "12x10", "blue"):
        assert part in printed
    assert run("data", "photos", "--check", "--json") == 0
    assert document(capsys)["splits"] == {"train": 6}
    assert sorted(photos.rglob("*")) == before


def test_data_takes_the_flags_that_fit_takes(photos: Path, capsys: Output) -> None:
    rows = [f"photos/{c}/00{i}.png;{c};{i};test" for c in ("blue", "red") for i in range(3)]
    Path("t.csv").write_text("\n".join(["foto;colour;number;stage", *rows]))
    columns = ("--image-column", "foto", "--split-column", "none", "--json")
    assert run("data", "t.csv", "--label", "colour", *columns) == 0
    found = document(capsys)
    assert [found["kind"], found["splits"]] == ["classification", {"train": 6}]
    assert run("data", "t.csv", "--label", "number", "--kind", "regression", *columns) == 0
    assert document(capsys)["classes"] == [{"name": "number"}]


def test_data_that_cannot_be_understood_is_a_sentence(photos: Path, capsys: Output) -> None:
    assert_refused("nothing does not exist", run("data", "nothing", "--json"), capsys)
    code = run("data", "photos", "--kind", "segmentation", "--json")
    assert_refused("such as photos/images/1.jpg", code, capsys)
