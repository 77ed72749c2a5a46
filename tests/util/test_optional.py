"""An optional package is imported, or an error says how to install it."""

import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from engram.errors import EngramError
from engram.util.optional import how_to_install, require


def test_an_installed_module_is_returned() -> None:
    assert require("json.decoder", extra="plots", purpose="This") is sys.modules["json.decoder"]


def test_a_missing_module_is_named_with_the_extra_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    expected = r"A plot needs the package matplotlib.*pip install .*matplotlib>=.*tensorboard"
    with pytest.raises(EngramError, match=expected):
        require("matplotlib.figure", extra="plots", purpose="A plot")


def test_what_the_module_itself_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_package.inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngramError, match="Reading needs the package no_such_package"):
        require("half_installed", extra="plots", purpose="Reading")


def test_how_to_install_names_packages_and_the_pins_of_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index has this package; an extra of an extra is what both need."""

    class Installed:
        direct_url: str | None = None

        def read_text(self, name: str) -> str | None:
            return self.direct_url

    requires = [
        "numpy>=2.0",
        'onnx>=1.18; extra == "export"',
        'engram-vit[export]; extra == "openvino"',
        'openvino>=2025.0; extra == "openvino"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    command = "pip install 'onnx>=1.18' 'openvino>=2025.0'"
    assert how_to_install("openvino", "openvino") == command
    assert how_to_install("newer", "package") == "pip install package"
    (tmp_path / "constraints.txt").touch()
    Installed.direct_url = json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    pins = f"-c {tmp_path / 'constraints.txt'} "
    assert how_to_install("openvino", "openvino") == command.replace("'", f"{pins}'", 1)
    Installed.direct_url = json.dumps({"url": (tmp_path / "engram.whl").as_uri()})
    assert how_to_install("openvino", "openvino") == command


def test_every_extra_that_the_code_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r'extra="([\w-]+)",\s*purpose=', text)}
    assert named
    assert named <= project["optional-dependencies"].keys()
