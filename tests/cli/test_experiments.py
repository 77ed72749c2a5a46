"""demo, bench and reproduce at the command line: their flags reach the experiments."""

from pathlib import Path

import pytest
from tests.support.commands import Output, assert_refused, document, run

import engram.experiments.bench
from engram.experiments.bench import BenchSettings
from engram.experiments.timing import Say
from engram.util.text import Description

REFUSED = {
    "--tasks is 'x'; give numbers with commas": ("bench", "--tasks", "x"),
    "There is no shape 'ViT-Z/1'; give ViT-Ti": ("bench", "--shape", "ViT-Z/1"),
    "--lr is 'a'; give numbers with commas": (
        *("reproduce", "--dataset", "cifar100", "--dry-run", "--lr", "a"),
    ),
    "--seeds is 0; at least one is needed": (
        *("reproduce", "--dataset", "cifar100", "--dry-run", "--seeds", "0"),
    ),
    "--lr is -1; it must be a number above 0": (
        *("reproduce", "--dataset", "cifar100", "--dry-run", "--lr", "-1"),
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    sentence: str, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(sentence, run(*REFUSED[sentence], "--json"), capsys)


def test_the_flags_of_bench_reach_it(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchSettings] = []

    def bench(settings: BenchSettings, say: Say) -> Description:
        asked.append(settings)
        say("measuring")
        return Description({"done": True}, [])

    monkeypatch.setattr(engram.experiments.bench, "bench", bench)
    assert run("bench", "--shape", "ViT-B/32", "--tasks", "1,2", "--batch", "4", "--json") == 0
    assert document(capsys) == {"done": True}
    assert asked == [BenchSettings(None, "ViT-B/32", [1, 2], [4])]


def test_a_plan_has_the_rates_and_steps_that_were_given(capsys: Output) -> None:
    command = ("reproduce", "--dataset", "digits", "--dry-run", "--lr", "0.1,0.3", "--seeds", 2)
    assert run(*command, "--steps", 50, "--json") == 0
    rows = document(capsys)["rows"]
    assert {(*row["rates"], row["seeds"], row["runs"], row["steps"]) for row in rows} == {
        (0.1, 0.3, 2, 4, 50)
    }
