"""The tested set is exact, complete, and free of what does not import beside a CPU torch."""

import re
import subprocess
import sys
import tomllib

import pytest
from scripts.lock import groups
from tests.support.paths import ROOT


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(file: str) -> dict[str, str]:
    """The pinned versions of a file by name."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)}


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    return versions("constraints.txt")


def test_every_declared_requirement_is_pinned(pins: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {normal(re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0]) for g in groups for line in g}
    assert names - {normal(project["name"])} <= pins.keys()


def test_pins_are_exact_and_portable(pins: dict[str, str]) -> None:
    assert pins["torch"] == "2.13.0"
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pins.values())


def test_nothing_needs_torchvision(pins: dict[str, str]) -> None:
    assert not pins.keys() & {"torchvision", "timm"}


LOCKS = ("locks/demo.txt", "locks/dev.txt", "locks/bench.txt")


def test_the_lock_files_pin_what_the_constraints_pin(pins: dict[str, str]) -> None:
    """All but torch, whose builds for CPU and for each version of CUDA have different hashes."""
    locked = [pair for file in LOCKS for pair in versions(file).items()]
    assert sorted(locked) == sorted(pins.items() - {("torch", pins["torch"])})
    assert versions("locks/serve.txt").items() <= pins.items()


@pytest.mark.parametrize("file", [*LOCKS, "locks/serve.txt"])
def test_every_locked_package_has_hashes_and_no_address(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    entries = re.sub(r"^#.*\n", "", text).replace(" \\\n", "").splitlines()
    hashed = re.compile(r"[a-z0-9-]+==[0-9a-z.]+(    --hash=sha256:[0-9a-f]{64})+")
    assert [entry for entry in entries if not hashed.fullmatch(entry)] == []


def test_the_demo_needs_less_than_development() -> None:
    demo = versions("locks/demo.txt")
    assert {"hatchling", "safetensors", "numpy"} <= demo.keys()
    assert not demo.keys() & {
        "pytest",
        "scikit-learn",
        "transformers",
        "fastapi",
        "onnxruntime",
        "mkdocs",
    }


def test_a_server_needs_no_tools_and_one_lock_file_is_all_of_it(pins: dict[str, str]) -> None:
    serve = versions("locks/serve.txt")
    assert {"fastapi", "uvicorn", "onnxruntime", "safetensors", "typer"} <= serve.keys()
    assert not serve.keys() & {"hatchling", "pytest", "datasets", "matplotlib"}
    assert serve.keys() == groups(pins.keys() - {"torch"})["serve"]


def test_import_leaves_optional_packages_alone() -> None:
    optional = {"torchvision", "timm", "transformers", "datasets", "matplotlib", "onnx", "fastapi"}
    code = f"import sys, engram; print(*sorted({optional!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
