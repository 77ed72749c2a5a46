"""At the command line a mistake is one sentence and exit code 2; nothing shows a traceback."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import Output, run
from tests.support.nursery import Nursery
from tests.support.waiting import FUSE

# What goes wrong


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("grow",), "No such command 'grow'"),
        (("inspect",), "Missing argument 'FILE|BUNDLE|BACKBONE'"),
        (("compose", "x"), "Missing option '-o'"),
        (("--wrong",), "No such option: --wrong"),
        (
            ("predict", "x", "--top", "2"),
            "No such option: --top",
        ),
        (("predict", "x", "--top-k", "two"), "Invalid value for '--top-k'"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exits_with_2(
    arguments: tuple[str, ...], sentence: str, capsys: Output
) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith(sentence)
    assert run(*arguments, "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"].startswith(sentence)


@pytest.mark.parametrize("arguments", [(), ("bundle",)])
def test_a_group_without_a_command_shows_its_help(
    arguments: tuple[str, ...], capsys: Output
) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert "Usage: engram" in said.out
    assert said.err == ""


def test_our_own_mistake_asks_for_a_report(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: str) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("engram.store.describe.describe", broken)
    assert run("inspect", "flowers.safetensors") == 1
    err = capsys.readouterr().err
    assert "RuntimeError: two lines" in err
    assert "report" in err
    assert "Traceback" not in err
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run("inspect", "flowers.safetensors")


def test_stopping_is_quiet(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(source: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engram.store.describe.describe", stopped)
    assert run("inspect", "flowers.safetensors") == 130
    assert capsys.readouterr().err == "Stopped.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_real_process_that_tidies_up(number: int, tmp_path: Path) -> None:
    code = (
        "import sys, time, types; from engram.cli.main import main\n"
        "def wait(source):\n"
        "    try: print('ready', flush=True), time.sleep(600)\n"
        "    finally: print('tidied up')\n"
        "sys.modules['engram.store.describe'] = types.SimpleNamespace(describe=wait)\n"
        "sys.exit(main(['inspect', 'x']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(number)
    out, err = child.communicate(timeout=FUSE)
    assert child.returncode == 130
    assert out == "tidied up\n"
    assert err == "Stopped.\n"


# In a process of its own


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from engram.cli.main import main; main(['--help'])\n"
        "print(*sys.modules.keys() & {'torch', 'numpy', 'PIL', 'safetensors'}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    for command in ("inspect", "compose", "convert"):
        assert command in done.stdout


def test_a_mistake_in_a_real_process(folder: Path, nursery: Nursery) -> None:
    done = nursery.run("inspect", "missing.safetensors", "--json", cwd=folder)
    assert done.code == 2
    assert json.loads(done.stdout) == {"error": done.stderr.strip()}
    assert "Traceback" not in done.stderr


def test_an_output_that_nobody_reads_is_no_traceback(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "engram", "inspect", "flowers.safetensors", "--json"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode in (1, 2)
    assert done.stderr == ""


def test_an_output_that_is_full_is_a_sentence(folder: Path, nursery: Nursery) -> None:
    full = Path("/dev/full")
    done = nursery.start("inspect", "flowers.safetensors", "--json", cwd=folder, stdout=full).wait()
    assert done.code in (1, 2)
    assert done.stderr.startswith("The output was lost")
    assert done.stderr.count("\n") == 1
