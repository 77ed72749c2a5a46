"""What is built to be installed elsewhere: complete, nothing else in it, and it works there."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path

import pytest
from scripts.describe_package import for_an_index
from tests.support.paths import ROOT

import engram

TINY_DEMO = """
import json
import engram
from engram.experiments.demo import DemoSize, run_demo
size = DemoSize(digits=40, digits_epochs=1, scenes=40, scenes_epochs=1, test=40, rounds=1)
print(json.dumps([engram.__file__, run_demo(size=size)["base_identical"]]))
"""


def run(*command: object, cwd: Path, **env: str) -> str:
    """A command that must succeed, without the variables that lead to this work tree."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [str(part) for part in command]
    done = subprocess.run(
        arguments, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel that is made from it rather than from the work tree."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"engram_vit-{engram.__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> EmailMessage:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return message_from_bytes(archive.read(name), policy=policy.default)


def files_of(folder: str, below: Path = ROOT) -> set[str]:
    """The files of a folder that git knows or would add: neither caches nor deploy/.env."""
    if not (ROOT / ".git").exists():
        pytest.skip("only a clone says which files belong to the project")
    listed = run("git", "ls-files", "-z", "-co", "--exclude-standard", folder, cwd=below)
    return {name for name in listed.split("\0") if name and (below / name).is_file()}


def test_both_are_fit_for_a_package_index(built: Path) -> None:
    files = sorted(built.iterdir())
    names = [f"engram_vit-{engram.__version__}-py3-none-any.whl"]
    assert [file.name for file in files] == [*names, f"engram_vit-{engram.__version__}.tar.gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Pages, templates and the bundled backbone are no Python, and are easily left out."""
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.startswith(f"engram_vit-{engram.__version__}.dist")}
    assert names - about == files_of("engram", ROOT / "src")
    assert {Path(name).name for name in about} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "entry_points.txt",
        "LICENSE",
        "NOTICE",
    }


def test_the_sdist_holds_what_it_takes_to_build_test_and_read(built: Path) -> None:
    with tarfile.open(built / f"engram_vit-{engram.__version__}.tar.gz") as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
    names = {name.partition("/")[2] for name in files}
    folders = ("benchmarks", "deploy", "docs", "examples", "locks", "scripts", "src", "tests")
    alone = {name for name in names if "/" not in name}
    assert {name.partition("/")[0] for name in names} - alone == set(folders)
    assert alone == {
        ".gitignore",  # hatchling puts it there: a build in the unpacked folder leaves out the same
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "NOTICE",
        "PKG-INFO",
        "README.md",
        "constraints.txt",
        "mkdocs.yml",
        "pyproject.toml",
    }
    for folder in folders:
        assert {name for name in names if name.startswith(f"{folder}/")} == files_of(folder)


def test_only_the_python_that_was_tried_is_listed(metadata: EmailMessage) -> None:
    classifiers = metadata.get_all("Classifier", [])
    versions = [line.rpartition(" ")[2] for line in classifiers if "Python :: 3." in line]
    assert versions == ["3.11"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_all("Project-URL") is None  # there is none yet


def test_the_text_on_an_index_has_no_dead_links(metadata: EmailMessage) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# Engram\n\n*Pages, pictures and files")
    assert "](https://arxiv.org/" in text
    assert not [part for part in text.split("](")[1:] if not part.startswith(("https://", "#"))]
    assert "<!--" not in text


def test_relative_links_become_text_and_relative_pictures_go() -> None:
    page = "# T\n\nSee [it](docs/a.md#b) and [that](https://x.y).\n\n![p](a.svg)\n\nEnd [in](#t).\n"
    expected = "See it and [that](https://x.y).\n\nEnd [in](#t).\n"
    assert for_an_index(page).endswith(f"*\n\n{expected}")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; what it needs comes from the one that runs the tests.

    A path file adds that one's packages, but not its own path files: its Engram, which is
    installed in place, is out of reach.
    """
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder)
    python = folder / "bin" / "python"
    offline = ("--no-index", "--no-deps", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", *offline)
    run(*pip, wheel, cwd=folder)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def test_the_wheel_works_outside_of_the_repository(
    installed: Path, tmp_path: Path, own_cache: Path
) -> None:
    assert run(installed / "bin" / "engram", "--version", cwd=tmp_path).split() == [
        "engram",
        engram.__version__,
    ]
    said = run(installed / "bin" / "python", "-c", TINY_DEMO, cwd=tmp_path)
    place, identical = json.loads(said.splitlines()[-1])
    assert Path(place).is_relative_to(installed)
    assert identical
    assert (tmp_path / "demo" / "report.html").is_file()
