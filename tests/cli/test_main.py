"""At the command line a mistake is one sentence and exit code 2; nothing shows a traceback."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import engram
from engram import EngramError, MemoryViT, random_trunk, save_trunk
from engram.cli import main as cli
from engram.cli.terminal import complain
from engram.images.preprocessing import Preprocessing
from engram.store.bundles import read_bundle
from engram.trunks.load import load_trunk

Output = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a trunk and two engrams on it: flowers, and roses, which extends it."""
    monkeypatch.chdir(tmp_path)
    trunk = random_trunk(image_size=16, patch=8, width=16, depth=2, heads=2)
    trunk.preprocessing = Preprocessing((16, 16), None)
    model = MemoryViT(load_trunk(save_trunk(trunk, "trunk")))
    model.add_task("flowers", classes=["rose", "tulip"], cells=3)
    model.add_task("roses", classes=7, cells=2, extends=["flowers"])
    model.save("flowers", "flowers.safetensors", metrics={"accuracy": 0.9125}, recipe={"lr": 0.01})
    model.save("roses", "roses.safetensors")
    return tmp_path


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def run_apart(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a shell would."""
    command = [sys.executable, "-m", "engram", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


# What is printed


def test_inspect_says_what_an_engram_is(folder: Path, capsys: Output) -> None:
    assert run("inspect", "flowers.safetensors") == 0
    said = capsys.readouterr().out
    header = engram.inspect("flowers.safetensors")
    for expected in (
        "flowers",
        "classification",
        "2 classes (rose, tulip)",
        "masked, 3 cells per layer",
        "146, 34 of them in the head",
        "kMAC per image",
        "% of the trunk's",
        "trunk  ",
        header.trunk.fingerprint,
        "16 x 16, squashed, bicubic",
        "accuracy 0.9125",
        "lr 0.01",
        header.created,
        header.content,
    ):
        assert expected in said


def test_inspect_needs_no_trunk(folder: Path, capsys: Output) -> None:
    (folder / "trunk" / "model.safetensors").unlink()
    assert run("inspect", "roses.safetensors") == 0
    assert "extends flowers" in " ".join(capsys.readouterr().out.split())


def test_json_is_one_document(folder: Path, capsys: Output) -> None:
    assert run("inspect", "flowers.safetensors", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["what"] == "engram"
    assert document["task"]["classes"] == ["rose", "tulip"]
    assert document["parameters"] == 146
    assert document["costs"]["macs"] > 0
    assert document["content"] == engram.inspect("flowers.safetensors").content
    assert document["bytes"] == os.path.getsize("flowers.safetensors")


def test_compose_and_inspect_a_bundle(folder: Path, capsys: Output) -> None:
    arguments = ("compose", "roses.safetensors", "flowers.safetensors", "--backbone", "trunk")
    assert run(*arguments, "-o", "garden/", "--json") == 0
    composed = json.loads(capsys.readouterr().out)
    assert [e["task"] for e in composed["engrams"]] == ["flowers", "roses"]
    assert len(read_bundle("garden").engrams) == 2
    assert run("inspect", "garden", "--json") == 0
    assert json.loads(capsys.readouterr().out) == composed
    assert run("inspect", "garden") == 0
    said = capsys.readouterr().out
    assert re.search(r"roses +classification +7 +masked +2 +flowers", said)


def test_inspect_a_trunk(folder: Path, capsys: Output) -> None:
    for source in ("trunk", "trunk/model.safetensors"):
        assert run("inspect", source, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["what"] == "trunk"
        assert document["fingerprint"] == load_trunk("trunk").fingerprint
    assert run("inspect", "trunk") == 0
    assert "width 16, 2 layers" in capsys.readouterr().out


def test_what_a_file_says_cannot_write_to_the_terminal(folder: Path, capsys: Output) -> None:
    model = MemoryViT(load_trunk("trunk"))
    model.trunk.source = "evil\x1b[2J\nsource"
    model.add_task("t", classes=["\x1b]0;title\x07", "\u202e"])
    model.save("t", "t.safetensors")
    assert run("inspect", "t.safetensors") == 0
    assert run("inspect", "t.safetensors", "--json") == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "\x1b" not in str(engram.inspect("t.safetensors"))


def test_convert(assets: Path, tmp_path: Path, capsys: Output) -> None:
    legacy = assets / "legacy"
    arguments = ("convert", legacy / "extended.pt", "--base", legacy / "base", "--names", "a,b")
    assert run(*arguments, "-o", tmp_path / "out", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["engrams"]
    assert first["file"] == str(tmp_path / "out" / "a.safetensors")
    assert second["task"]["extends"] == ["a"]
    assert run(*arguments, "-o", tmp_path / "out") == 0
    assert "b.safetensors" in capsys.readouterr().out


def test_a_mistake_is_one_line_with_the_spaces_of_a_path(capsys: Output) -> None:
    complain("my  photos/a.png does not exist:\n\n  look elsewhere\n", as_json=True)
    said = capsys.readouterr()
    assert said.err == "my  photos/a.png does not exist: look elsewhere\n"
    assert json.loads(said.out) == {"error": said.err.strip()}


def test_the_version(capsys: Output) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"engram {engram.__version__}\n"


# What goes wrong

MISTAKES = [
    ("inspect", "missing.safetensors"),
    ("inspect", "."),
    ("inspect", "old.pt"),
    ("inspect", "text.safetensors"),
    ("compose", "roses.safetensors", "-o", "out"),
    ("compose", "flowers.safetensors", "-o", "."),
    ("compose", "flowers.safetensors", "-o", "out", "--backbone", "missing"),
    ("convert", "old.pt", "--base", "trunk", "-o", "out"),
    ("convert", "flowers.safetensors", "--base", "trunk", "-o", "out"),
]


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_sentence(
    arguments: tuple[str, ...], folder: Path, capsys: Output
) -> None:
    torch.save({"a": 1}, "old.pt")
    Path("text.safetensors").write_text("no safetensors at all")
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.rstrip().endswith(".")
    assert run(*arguments, "--json") == 2
    assert json.loads(capsys.readouterr().out) == {"error": err.rstrip()}


@pytest.mark.parametrize("arguments", [("grow",), ("inspect",), ("compose", "x"), ("--wrong",)])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], capsys: Output) -> None:
    assert run(*arguments) == 2
    assert "Usage: engram" in capsys.readouterr().err


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
        "import sys, time, engram.store.describe as d; from engram.cli.main import main\n"
        "def wait(source):\n"
        "    print('ready', flush=True)\n"
        "    try: time.sleep(60)\n"
        "    finally: print('tidied up')\n"
        "d.describe = wait\n"
        "sys.exit(main(['inspect', 'x']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.1)
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
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


def test_a_mistake_in_a_real_process(folder: Path) -> None:
    done = run_apart("inspect", "missing.safetensors", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"error": done.stderr.strip()}
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a pipe and /dev/full")
def test_an_output_that_fails_is_no_traceback(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe, open("/dev/full", "w") as full:
        for stdout, said in ((pipe, ""), (full, "The output was lost")):
            done = subprocess.run(
                [sys.executable, "-m", "engram", "inspect", "flowers.safetensors", "--json"],
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            assert done.returncode in (1, 2)
            assert done.stderr.startswith(said)
            assert done.stderr.count("\n") == bool(said)


def test_the_public_names_are_themselves_whatever_was_imported() -> None:
    code = (
        "import engram.store.format, engram.model, engram\n"
        "assert callable(engram.inspect) and engram.inspect is engram.store.format.read_engram\n"
        "assert set(engram.__all__) <= set(dir(engram))\n"
        "for name in engram.__all__: assert callable(getattr(engram, name)), name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        engram.nothing  # noqa: B018
    assert issubclass(EngramError, Exception)
