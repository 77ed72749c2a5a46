"""Text of a stranger's file reaches the terminal only in a form that no terminal obeys."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.support.commands import Output, run
from tests.support.damage import joined, sealed, split, with_content

from engram import MemoryViT, load_backbone

# Sets the title, clears the screen, turns the text around, moves the cursor up, is a second line.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202etxt.exe\u2066\x9b1A\x08\r\nfake  row"

METRICS = {HOSTILE: HOSTILE, "test": {"accuracy": 0.5, HOSTILE: 0.5}}


@pytest.fixture
def work(tmp_path: Path, small_backbone: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_backbone, "vit")
    Image.new("RGB", (20, 16), (210, 50, 60)).save("red.png")
    model = MemoryViT(load_backbone("vit"))
    model.add_task("a", ["red", HOSTILE], 2, seed=0)
    model.save("a", "a.safetensors", metrics=METRICS, recipe={"data": HOSTILE})
    return tmp_path


def with_source(name: str) -> str:
    """The engram, with a backbone of a hostile name and other hostile facts."""
    data = Path("a.safetensors").read_bytes()
    outer, body = split(data)
    header = json.loads(outer["__metadata__"]["engram"])
    header["backbone"]["source"] = header["created"] = header["library"] = HOSTILE
    header = with_content(header, data)
    Path(name).write_bytes(joined(sealed(outer, header), body))
    return name


def with_bad_header() -> str:
    outer, body = split(Path("a.safetensors").read_bytes())
    header = json.loads(outer["__metadata__"]["engram"])
    header["task"][HOSTILE] = HOSTILE
    Path("bad.safetensors").write_bytes(joined(sealed(outer, header), body))
    return "bad.safetensors"


def backbone_with(**settings: Any) -> str:
    config = json.loads(Path("vit/config.json").read_text())
    Path("vit/config.json").write_text(json.dumps({**config, **settings}))
    return "vit"


def backbone_with_tensor() -> str:
    tensors = load_file("vit/model.safetensors")
    save_file({**tensors, HOSTILE: tensors["class_token"].clone()}, "vit/model.safetensors")
    return "vit"


def broken_image() -> str:
    name = f"{HOSTILE}.png"
    Path(name).write_bytes(b"no image")
    return name


def class_folders() -> str:
    for name in ("red", f"blue{HOSTILE}"):
        os.makedirs(f"photos/{name}")
    shutil.copy("red.png", "photos/red/0.png")
    return "photos"


def arrays() -> str:
    np.savez("x.npz", **{HOSTILE: np.zeros(3)})
    return "x.npz"


def table() -> str:
    Path("x.csv").write_text(f'image,"{HOSTILE}"\nred.png,1\n', newline="")
    return "x.csv"


def bundle(content: str) -> str:
    os.mkdir("garden")
    shutil.copy("a.safetensors", "garden/a.safetensors")
    entry = {"task": "a", "file": "a.safetensors", "content": content}
    manifest = {"format": 1, "engrams": [entry], "backbone": HOSTILE}
    Path("garden/bundle.json").write_text(json.dumps(manifest))
    return "garden"


FIT = ("--task", "new", "-o", "new.safetensors", "--backbone", "vit")
# What is run, and its exit code.
COMMANDS: dict[str, tuple[Callable[[], tuple[str, ...]], int]] = {
    "inspect": (lambda: ("inspect", with_source("b.safetensors")), 0),
    "list": (lambda: ("list", str(Path(with_source("b.safetensors")).parent)), 0),
    "push": (lambda: ("push", with_source("b.safetensors"), "--to", "a/b", "--dry-run"), 0),
    "answers": (lambda: ("predict", "a.safetensors", "red.png"), 0),
    "a backbone that is not there": (
        lambda: ("predict", with_source("b.safetensors"), "red.png"),
        2,
    ),
    "an image": (lambda: ("predict", "a.safetensors", broken_image()), 2),
    "an image that is not there": (lambda: ("predict", "a.safetensors", f"{HOSTILE}.png"), 2),
    "a header": (lambda: ("inspect", with_bad_header()), 2),
    "a manifest": (lambda: ("inspect", bundle("0" * 64)), 2),
    "a manifest's content": (lambda: ("inspect", bundle(HOSTILE)), 2),
    "a model type": (lambda: ("inspect", backbone_with(engram_backbone=HOSTILE)), 2),
    "labels": (lambda: ("inspect", backbone_with(labels=[HOSTILE] * 7)), 0),
    "activation": (lambda: ("inspect", backbone_with(config={"activation": HOSTILE})), 2),
    "a tensor": (lambda: ("inspect", backbone_with_tensor()), 2),
    "a path": (lambda: ("inspect", f"{HOSTILE}.safetensors"), 2),
    "class folders": (lambda: ("fit", class_folders(), *FIT), 2),
    "arrays": (lambda: ("fit", arrays(), *FIT), 2),
    "a table": (lambda: ("fit", table(), *FIT), 2),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_the_terminal_gets_no_foreign_control_characters(
    what: str, work: Path, capsys: Output
) -> None:
    command, code = COMMANDS[what]
    arguments = command()
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    for text in (out, err):
        assert [line for line in text.split("\n") if not line.isprintable()] == []
    assert not any(line.startswith("fake") for line in (out + err).splitlines())
    assert run(*arguments, "--json") == code
    document = capsys.readouterr().out
    assert document.isascii()
    assert [line for line in document.split("\n") if not line.isprintable()] == []
    json.loads(document)
