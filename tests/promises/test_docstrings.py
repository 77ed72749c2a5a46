"""Docstrings of public names describe every parameter, and their examples run as shown."""

import dataclasses
import doctest
import inspect
import operator
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import engram

#: Public names that are reached through a folder.
FOLDERS = (
    "data.load",
    "data.Loader",
    "images.normalise",
    "export.export_onnx",
    "export.export_torch",
    "export.OnnxModel",
    "store.legacy.convert",
    "tasks.costs.task_costs",
)
METHODS = {
    "MemoryViT": (
        *("task", "add_task", "attach", "detach", "engram", "save", "forward", "embed"),
        "attention",
        *("rows", "from_pretrained", "save_pretrained", "push_to_hub", "load_state_dict"),
    ),
    "ViT": ("tokens", "forward", "fingerprint"),
}


def public() -> Iterator[tuple[str, Any]]:
    """Every public name, and the public methods of the two central classes."""
    for name in (*engram.__all__, "list", *FOLDERS):
        thing = operator.attrgetter(name)(engram)
        yield name, thing
        for method in METHODS.get(name, ()):
            found = inspect.getattr_static(thing, method)
            yield (
                f"{name}.{method}",
                found if isinstance(found, property) else getattr(thing, method),
            )


PUBLIC = dict(public())
FUNCTIONS = [
    name
    for name, thing in PUBLIC.items()
    # The reference lists the settings of a recipe from the recipe itself.
    if not (isinstance(thing, property) or dataclasses.is_dataclass(thing) or name == "EngramError")
]


def section(name: str, title: str) -> str:
    text = inspect.getdoc(PUBLIC[name]) or ""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_describes_every_parameter(name: str) -> None:
    signature = inspect.signature(PUBLIC[name])
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    expected = [stars.get(p.kind, "") + p.name for p in signature.parameters.values()]
    described = re.findall(r"^    (\*{0,2}\w+): \S", section(name, "Args"), re.MULTILINE)
    assert described == [one for one in expected if one != "self"]
    returns_something = not inspect.isclass(PUBLIC[name]) and signature.return_annotation != "None"
    assert bool(section(name, "Returns")) == returns_something


@pytest.fixture(scope="module")
def garden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the examples name: photos, two engrams of a task, a bundle."""
    folder = tmp_path_factory.mktemp("garden")
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for flower, colour in (("rose", (200, 20, 60)), ("tulip", (220, 200, 40))):
            (folder / "photos" / split / flower).mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(rng.normal(colour, 30, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / split / flower / f"{i}.png")
    for trained in ("flowers", "again"):
        model_of_flowers().save("flowers", folder / f"{trained}.safetensors")
    engram.compose([folder / "flowers.safetensors"], folder / "garden")
    return folder


def model_of_flowers() -> engram.MemoryViT:
    model = engram.MemoryViT(engram.load_backbone("pico"))
    model.add_task("flowers", classes=["rose", "tulip"], cells=5)
    return model


# Exporting takes seconds; docs/export.md does what those examples show.
@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("export.")])
def test_an_example_runs_as_shown(
    name: str, garden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(garden, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = {"engram": engram, "torch": torch, "transformers": transformers}
    example = section(name, "Examples")
    assert example.count(">>> ") >= 1, f"engram.{name} has no example"
    found = doctest.DocTestParser().get_doctest(
        example, {**names, "model": model_of_flowers()}, f"engram.{name}", None, None
    )
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(found, out=said.append)
    assert not said, "".join(said)
