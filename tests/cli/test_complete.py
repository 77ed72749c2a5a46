"""What a shell completes: commands, flags, choices, and the tasks of a bundle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import Output, run


def completed(*words: str) -> list[str]:
    """What bash offers for the last word, from a process that may not import torch."""
    code = (
        "import sys; from engram.cli.main import main\n"
        "code = main()\n"
        "print(*sys.modules.keys() & {'torch', 'numpy', 'PIL'}, file=sys.stderr)"
    )
    environment = {
        **os.environ,
        "_ENGRAM_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("engram", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.split() == []
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("comp",), ["compose"]),
        (("fit", "--max-b"), ["--max-bad"]),
        (("fit", "photos", "--regime", "masked"), ["masked", "masked+adapter"]),
        (("fit", "photos", "--optimizer", "s"), ["sgd"]),
        (("fit", "photos", "--recipe", "p"), ["paper"]),
        (("eval", "x", "--split", "t"), ["train", "test"]),
    ],
)
def test_commands_flags_and_choices_are_completed(
    words: tuple[str, ...], offered: list[str]
) -> None:
    assert completed(*words) == offered


def test_the_tasks_of_files_and_bundles_are_completed(folder: Path, capsys: Output) -> None:
    assert run("compose", "roses.safetensors", "flowers.safetensors", "-o", "garden") == 0
    assert completed("bundle", "remove", "garden", "r") == ["roses"]
    assert completed("predict", "flowers.safetensors", "backbone", "--task", "f") == ["flowers"]


def test_the_script_for_a_shell_is_printed(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("zsh", "/bin/zsh"))
    assert run("--show-completion") == 0
    assert "#compdef engram" in capsys.readouterr().out
