"""Write the lock files: the pinned packages with the hashes of all their files.

    .venv/bin/python -m scripts.lock

`locks/demo.txt` has what `make demo` needs, `locks/dev.txt` what development needs in addition, and
`locks/bench.txt` the rest of `constraints.txt`. `locks/serve.txt` is complete by itself: what a
machine needs that only serves, with every engine and traces. Run it after `make setup` with the
new versions in force: which package needs which is read from what is installed. The hashes are
those that pip's configured index lists, for every platform. torch is not locked: its builds for CPU
and for each version of CUDA come from other indexes, and their hashes differ.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = ROOT / "locks"
UNLOCKED = "torch"
HEAD = f"# Written by scripts/lock.py from constraints.txt; {UNLOCKED} is left out on purpose.\n"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """The versions of constraints.txt by name, without torch."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normal(name): version for name, version in pairs if normal(name) != UNLOCKED}


# What needs what


def parse(requirement: str) -> tuple[str, set[str], str]:
    """Name, extras and marker of a requirement."""
    wanted, _, marker = requirement.partition(";")
    found = re.match(r"\s*([\w.-]+)\s*(?:\[([^]]*)\])?", wanted)
    assert found, requirement
    extras = {part.strip() for part in (found[2] or "").split(",") if part.strip()}
    return normal(found[1]), extras, marker


def requirements_of(name: str, extras: set[str]) -> list[str]:
    """What a package needs with these extras on any platform; nothing if it is not installed."""
    if name == normal(PROJECT["project"]["name"]):  # what is installed may be older than the file
        optional = PROJECT["project"]["optional-dependencies"]
        return [requirement for extra in extras for requirement in optional[extra]]
    try:
        declared = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in declared:
        of = re.findall(r"extra\s*==\s*['\"]([^'\"]+)['\"]", parse(requirement)[2])
        if not of or extras & set(of):
            found.append(requirement)
    return found


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of these packages and of everything that they need."""
    waiting, seen = list(requirements), set[tuple[str, frozenset[str]]]()
    while waiting:
        name, extras, _ = parse(waiting.pop())
        if (name, frozenset(extras)) not in seen:
            seen.add((name, frozenset(extras)))
            waiting += requirements_of(name, extras)
    return {name for name, _ in seen}


def groups(pins: Iterable[str]) -> dict[str, set[str]]:
    """The packages of each lock file; every package is in demo, dev or bench."""
    project = PROJECT["project"]
    build = [*PROJECT["build-system"]["requires"], "editables"]
    optional = project["optional-dependencies"]
    needed, all_pins = project["dependencies"], set(pins)
    demo = closure([*build, *needed]) & all_pins
    dev = (closure(optional["dev"]) & all_pins) - demo
    served = [
        line for extra in ("serve", "export", "openvino", "tracing") for line in optional[extra]
    ]
    serve = closure([*needed, *served]) & all_pins
    return {"demo": demo, "dev": dev, "bench": all_pins - demo - dev, "serve": serve}


# Hashes


def configured_index() -> str:
    """The URL of the index that pip uses."""
    from pip._internal.models.index import PyPI

    get = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    found = subprocess.run(get, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or found or str(PyPI.simple_url)


def hashes(index: str, name: str, version: str) -> list[str]:
    """The SHA-256 of every file of this version."""
    with urllib.request.urlopen(f"{index.rstrip('/')}/{name}/", timeout=60) as answer:
        page = answer.read().decode()
    found = set()
    for link in re.findall(r'href="([^"]+)"', page):
        file, _, digest = link.partition("#sha256=")
        if digest and is_file_of(file.rpartition("/")[2], name, version):
            found.add(digest[:64])
    if not found:
        raise SystemExit(f"The index lists no file of {name} {version}.")
    return sorted(found)


def is_file_of(file: str, name: str, version: str) -> bool:
    """Whether a wheel or source distribution has this name and version."""
    stem = file.removesuffix(".tar.gz").removesuffix(".zip")
    if file.endswith(".whl"):
        named, found = file.split("-")[:2]
    else:
        named, _, found = stem.rpartition("-")
    return normal(named) == name and found == version


def lines_of(name: str, version: str, digests: Iterable[str]) -> Iterator[str]:
    yield f"{name}=={version} \\"
    yield " \\\n".join(f"    --hash=sha256:{digest}" for digest in digests)


def main() -> None:
    pins, index = pinned(), configured_index()
    with ThreadPoolExecutor(8) as pool:
        found = dict(
            zip(pins, pool.map(lambda pin: hashes(index, *pin), pins.items()), strict=True)
        )
    LOCKS.mkdir(exist_ok=True)
    for group, names in groups(pins).items():
        lines = [line for name in sorted(names) for line in lines_of(name, pins[name], found[name])]
        (LOCKS / f"{group}.txt").write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
        print(f"{group}: {len(names)} packages")


if __name__ == "__main__":
    main()
