"""The notebooks in examples/ run from top to bottom, wherever they are started, as shown."""

import json
import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    content = nbformat.read(notebook, as_version=4)
    nbclient.execute(content, cwd=str(elsewhere), timeout=600, kernel_name="python3")
    assert not list(elsewhere.iterdir()), "a notebook writes into a folder of its own"
    outputs = [output for cell in content.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    complaints = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in complaints if "IProgress" not in text]  # tqdm without ipywidgets


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(notebook: Path) -> None:
    nbformat.validate(nbformat.read(notebook, as_version=4))
    assert all(not cell["outputs"] for cell in cells(notebook, "code"))
    assert all(cell["execution_count"] is None for cell in cells(notebook, "code"))
    assert "".join(cells(notebook, "markdown")[0]["source"]).startswith("# ")


def test_the_paper_fits_in_150_lines() -> None:
    code = cells(ROOT / "examples" / "the_paper_in_150_lines.ipynb", "code")
    lines = [line for cell in code for line in "".join(cell["source"]).splitlines()]
    assert len([line for line in lines if line.strip()]) <= 150


def test_every_notebook_is_introduced() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if path.name not in page] == []
    assert NOTEBOOKS
