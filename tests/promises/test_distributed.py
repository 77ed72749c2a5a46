"""Two processes learn, measure and answer what one does; only the first writes and prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from tests.support.ports import free_port
from tests.support.runs import Fact, reached, step_of

import engram


@pytest.fixture
def two(nursery: Any) -> Callable[..., list[Any]]:
    """Starts a command in two processes, with the environment that torchrun gives them."""

    def start(*arguments: object, hold: Fact | None = None) -> list[Any]:
        port = free_port()
        return [
            nursery.start(
                *arguments,
                hold=hold,
                RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            )
            for rank in range(2)
        ]  # fmt: skip

    return start


@pytest.fixture
def pair(two: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Runs a command in two such processes."""

    def run(*arguments: object) -> list[Any]:
        both = two(*arguments)
        for process in both:
            process.wait()
            assert process.code == 0, process.stderr
        assert both[1].stdout == ""
        assert "Traceback" not in both[0].stderr + both[1].stderr
        return both

    return run


def arguments(backbone: Path, data: Path, out: Path, *more: object) -> list[object]:
    return [
        *("fit", data, "--task", "colours", "--backbone", backbone, "-o", out, "--json"),
        *("--regime", "masked", "--steps", 8, "--evaluations", 2, "--workers", 0, *more),
    ]


def agree(one: Path, two: Path, tolerance: float) -> None:
    assert engram.inspect(one).spec == engram.inspect(two).spec
    alone, shared = load_file(one), load_file(two)
    for name in alone:
        most = 0.01 if name.startswith("statistics.") else tolerance  # they are in half precision
        assert (alone[name] - shared[name]).abs().max().item() <= most, name


#: The second batch of an epoch has one image (of 54), so one process has none of it.
UNEVEN = ("--batch", 53, "--cache", "off", "--augment", "pad-crop")


def test_torchrun_learns_what_one_process_does(
    nursery: Any, small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    alone = nursery.run(*arguments(small_backbone, colours, one, *UNEVEN))
    assert alone.code == 0, alone.stderr
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "engram", *arguments(small_backbone, colours, two, *UNEVEN)),
    ]
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)  # one document: only the first process prints
    assert said["path"] == str(two)
    assert said["metrics"]["val"]["images"] == 60
    agree(one, two, 1e-5)
    histories = [path.with_suffix(".run") / "history.csv" for path in (one, two)]
    a, b = (np.genfromtxt(path, delimiter=",", skip_header=1) for path in histories)
    assert np.allclose(a, b, atol=1e-4)


def test_two_processes_share_the_cache(
    nursery: Any,
    pair: Callable[..., list[Any]],
    small_backbone: Path,
    colours: Path,
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    settings = ("--batch", 16, "--cache", "on", "--optimizer", "sgd", "--lr", 0.1, "--test")
    both = pair(*arguments(small_backbone, colours, two, *settings))
    stored = json.loads(nursery.run("cache", "info", "--json").stdout)["caches"]
    assert [entry["images"] for entry in stored] == [60]  # each image by one of them
    alone = nursery.run(*arguments(small_backbone, colours, one, *settings))
    assert alone.code == 0, alone.stderr
    agree(one, two, 1e-5)
    a, b = (json.loads(text)["metrics"] for text in (alone.stdout, both[0].stdout))
    assert a["test"]["images"] == b["test"]["images"] == 21
    assert a["test"]["accuracy"] == b["test"]["accuracy"]
    assert a["val"]["loss"] == pytest.approx(b["val"]["loss"], abs=1e-5)


@pytest.mark.parametrize("regime", ["auto", "readout"])
def test_two_processes_choose_what_one_does(
    regime: str,
    nursery: Any,
    pair: Callable[..., list[Any]],
    small_backbone: Path,
    colours: Path,
    tmp_path: Path,
) -> None:
    """The last batch of an epoch has one image, so one process solves with one batch less."""
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    settings = ("--batch", 53, "--regime", regime, "--test")
    alone = nursery.run(*arguments(small_backbone, colours, one, *settings))
    assert alone.code == 0, alone.stderr
    both = pair(*arguments(small_backbone, colours, two, *settings))
    a, b = (json.loads(text) for text in (alone.stdout, both[0].stdout))
    assert (a["regime"], a["parameters"]) == (b["regime"], b["parameters"])
    assert a["metrics"]["test"]["accuracy"] == b["metrics"]["test"]["accuracy"]
    # Rounding takes the solver another way to nearly the same minimum.
    assert a["metrics"]["test"]["loss"] == pytest.approx(b["metrics"]["test"]["loss"], abs=0.01)
    for mine, other in zip(a.get("tried", ()), b.get("tried", ()), strict=True):
        assert (mine["regime"], mine["kept"]) == (other["regime"], other["kept"])
        assert mine["value"] == pytest.approx(other["value"], abs=0.2)  # an image of six


def test_two_processes_killed_and_stopped_end_with_the_same_bits(
    two: Callable[..., list[Any]],
    pair: Callable[..., list[Any]],
    small_backbone: Path,
    colours: Path,
    tmp_path: Path,
) -> None:
    whole, out = tmp_path / "whole.safetensors", tmp_path / "out.safetensors"
    settings = (*UNEVEN, "--steps", 24, "--checkpoint-seconds", 0, "--ema", 0.9)
    pair(*arguments(small_backbone, colours, whole, *settings))
    run = arguments(small_backbone, colours, out, *settings)

    first, second = two(*run, hold=reached(out, 2))
    second.signal_when(signal.SIGKILL, reached(out, 2))  # the other is left alone
    first.let_go()
    assert first.wait().code == 2, first.stderr
    assert "Another process" in first.stderr
    assert "Traceback" not in first.stderr
    assert json.loads(first.stdout)["error"] in first.stderr

    first, second = two(*run, "--resume", hold=reached(out, 8))
    second.signal_when(signal.SIGTERM, reached(out, 8), wait=False)  # only one is told
    first.let_go()
    second.wait()
    assert (first.wait().code, second.code) == (130, 130), first.stderr + second.stderr
    assert "with --resume to continue" in first.stderr
    assert not out.exists()
    stopped = step_of(out)
    assert 8 <= stopped < 24

    pair(*run, "--resume")
    assert engram.inspect(out).content == engram.inspect(whole).content
    histories = [path.with_suffix(".run") / "history.csv" for path in (whole, out)]
    assert histories[0].read_text() == histories[1].read_text()


def test_a_sweep_and_bad_files_are_shared(
    pair: Callable[..., list[Any]], small_backbone: Path, tmp_path: Path
) -> None:
    for name, colour in (("light", 200), ("dark", 50)):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (16, 16), (colour + i, colour, colour)).save(folder / f"{i:02}.png")
    bad = tmp_path / "photos" / "dark" / "03.png"
    bad.write_bytes(b"broken")
    out = tmp_path / "out.safetensors"
    settings = ("--steps", 6, "--batch", 8, "--workers", 0, "--max-bad", 0.1, "--cache", "off")
    both = pair(
        *("sweep", tmp_path / "photos", "--task", "light", "--backbone", small_backbone, "-o", out),
        *("--lr", "0.001,0.01", *settings, "--json"),
    )
    said = json.loads(both[0].stdout)
    assert len(said["settings"]) == 2
    assert engram.inspect(out).spec.classes == ("dark", "light")
    assert str(bad) in (tmp_path / "out.run" / "unreadable.txt").read_text()


def test_eval_and_predict_answer_what_one_process_does(
    nursery: Any,
    pair: Callable[..., list[Any]],
    small_backbone: Path,
    tmp_path: Path,
    colours: Path,
) -> None:
    out = tmp_path / "one.safetensors"
    assert nursery.run(*arguments(small_backbone, colours, out, "--batch", 16)).code == 0
    data = ("--data", f"colours={colours}", "--workers", 0, "--json")
    alone = json.loads(nursery.run("eval", out, *data).stdout)["colours"]
    shared = json.loads(pair("eval", out, *data)[0].stdout)["colours"]
    assert shared == {key: pytest.approx(value, abs=1e-6) for key, value in alone.items()}
    assert shared["images"] == 21
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(5):
        Image.new("RGB", (16, 16), (50 * i, 90, 200)).save(photos / f"{i}.png")
    one = json.loads(nursery.run("predict", out, photos, "--json").stdout)
    two = json.loads(pair("predict", out, photos, "--json")[0].stdout)
    assert [answer["image"] for answer in two] == [str(photos / f"{i}.png") for i in range(5)]
    for a, b in zip(one, two, strict=True):
        assert [c["class"] for c in a["tasks"]["colours"]] == [
            c["class"] for c in b["tasks"]["colours"]
        ]
