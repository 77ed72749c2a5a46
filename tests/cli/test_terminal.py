"""Results and mistakes for people and for machines."""

import json
from pathlib import Path

import pytest
from tests.support.commands import Output

from engram.cli.terminal import complain, notice_or_warning, show
from engram.errors import Notice
from engram.util.text import Description


def test_a_mistake_is_one_line_with_the_spaces_of_a_path(capsys: Output) -> None:
    complain("my  photos/a.png does not exist:\n\n  look elsewhere\n", as_json=True)
    said = capsys.readouterr()
    assert said.err == "my  photos/a.png does not exist: look elsewhere\n"
    assert json.loads(said.out) == {"error": said.err.strip()}


RESULT = Description({"a": [1, 2]}, [("file", "x.bin"), ("size", "3 MB")], ("task",), (("t",),))


def test_a_result_is_a_document_for_machines_and_a_table_for_people(capsys: Output) -> None:
    show(RESULT, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": [1, 2]}
    show(RESULT, as_json=False)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["file  x.bin", "size  3 MB"]
    table = [line.strip() for line in said[2:] if line.strip()]
    assert (table[0], table[-1]) == ("task", "t")


def test_names_are_printed_as_they_are(capsys: Output) -> None:
    show(Description({}, [("class", "[bold]x[/bold] :smile:")]), as_json=False)
    assert capsys.readouterr().out == "class  [bold]x[/bold] :smile:\n"


HOSTILE = "a\x1b[2J\u202eb\nc"
SHOWN = r"a\x1b[2J\u202eb\nc"


def test_foreign_text_is_shown_and_not_obeyed(capsys: Output) -> None:
    show(Description({}, [(HOSTILE, HOSTILE)], (HOSTILE,), ((HOSTILE,),)), as_json=False)
    row, *table = capsys.readouterr().out.splitlines()
    assert row == f"{SHOWN}  {SHOWN}"
    assert [line.strip() for line in table if "a" in line] == [SHOWN, SHOWN]
    complain(f"There is no {HOSTILE}.", as_json=True)
    said = capsys.readouterr()
    assert said.err == "There is no a\\x1b[2J\\u202eb c.\n"  # always one line
    assert json.loads(said.out) == {"error": "There is no a\x1b[2J\u202eb c."}
    assert notice_or_warning(Notice(HOSTILE), Notice, "x.py", 3) == f"{SHOWN}\n"
    assert "\x1b" not in notice_or_warning(UserWarning(HOSTILE), UserWarning, "x.py", 3)


def test_only_a_block_has_several_lines(capsys: Output) -> None:
    show(Description({}, [("card", "\n# Title\n\x1b[2J\n")]), as_json=False)
    assert capsys.readouterr().out == "card  \n# Title\n\\x1b[2J\n\n"


def test_a_document_is_json_whatever_was_measured(capsys: Output) -> None:
    values = {"loss": float("nan"), "best": [float("inf"), -float("inf"), 0.5], "path": Path("x")}
    show(Description(values, []), as_json=True)
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said == {"loss": None, "best": [None, None, 0.5], "path": "x"}


def test_only_the_first_process_prints(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    show(RESULT, as_json=True)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    show(RESULT, as_json=True)
    assert capsys.readouterr().out != ""


def test_a_notice_is_its_sentence_and_a_warning_says_where_it_comes_from() -> None:
    assert notice_or_warning(Notice("The cache is not used."), Notice, "x.py", 3) == (
        "The cache is not used.\n"
    )
    text = notice_or_warning(UserWarning("odd"), UserWarning, "x.py", 3)
    assert text.startswith("x.py:3: UserWarning: odd")
