"""The tested set is exact, complete, and free of what does not import beside a CPU torch."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("file", LOCKS)
def test_every_locked_package_has_hashes_and_no_address(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    entries = re.sub(r"^#.*\n", "", text).replace(" \\\n", "").splitlines()
    hashed = re.compile(r"[a-z0-9-]+==[0-9a-z.]+(    --hash=sha256:[0-9a-f]{64})+")
    assert [entry for entry in entries if not hashed.fullmatch(entry)] == []


def test_the_demo_needs_less_than_development() -> None:
    demo = versions("locks/demo.txt")
    assert {"hatchling", "scikit-learn", "numpy"} <= demo.keys()
    assert not demo.keys() & {"pytest", "transformers", "fastapi", "onnxruntime", "mkdocs"}


def test_import_leaves_optional_packages_alone() -> None:
    optional = {"torchvision", "timm", "transformers", "datasets", "matplotlib", "onnx", "fastapi"}
    code = f"import sys, engram; print(*sorted({optional!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_what_is_built_holds_every_file_of_the_package(target: str, tmp_path: Path) -> None:
    """Templates, styles and the bundled trunk are no Python, and are easily left out."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (built,) = tmp_path.iterdir()
    if target == "wheel":
        names = set(zipfile.ZipFile(built).namelist())
    else:
        with tarfile.open(built) as archive:
            names = {name.partition("/src/")[2] for name in archive.getnames()}
    source = ROOT / "src"
    files = [p for p in (source / "engram").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert {str(path.relative_to(source)) for path in files} <= names
