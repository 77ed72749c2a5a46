"""The notebooks in examples/ run from top to bottom, wherever they are started, as shown."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from jupyter_client.manager import KernelManager
from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One kernel for all notebooks: starting it takes longer than some of them."""
    folder = tmp_path_factory.mktemp("kernel")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR"):
        env[name] = str(folder / name.lower())
        (folder / name.lower()).mkdir()
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder), env=env)
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def common_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features that one notebook computed, the next one need not."""
    return tmp_path_factory.mktemp("notebooks")


#: Nearly all the time is learning, image by image and epoch after epoch: less of it will do.
LESS = {
    r"\bepochs=\d+": "epochs=1",
    r"\btrain=240\b": "train=60",
    r"\(range\(240\)\)": "(range(60))",
    r"\[:400\]": "[:100]",
    r"\[400:650\]": "[400:470]",
    r"\(\"train\", 400, 0\), \(\"test\", 100, 1\)": '("train", 100, 0), ("test", 50, 1)',
}
#: As in a kernel that was started in this folder: no names.
ANEW = """%reset -f
import os
import re
os.chdir({folder!r})
os.environ["ENGRAM_CACHE"] = {cache!r}
del os
"""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    notebook: Path, kernel: KernelManager, tmp_path: Path, common_cache: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    content = nbformat.read(notebook, as_version=4)
    begin = ANEW.format(folder=str(elsewhere), cache=str(common_cache))
    for cell, (more, less) in itertools.product(content.cells, LESS.items()):
        cell.source = re.sub(more, less, cell.source)
    content.cells.insert(0, nbformat.v4.new_code_cell(begin))
    nbclient.NotebookClient(content, km=kernel, timeout=600).execute()
    assert not list(elsewhere.iterdir()), "a notebook writes into a folder of its own"
    outputs = [output for cell in content.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    complaints = [output["text"] for output in outputs if output.get("name") == "stderr"]
    usual = ("IProgress", "Notice: ")  # tqdm without ipywidgets; what fit says about the images
    assert not [text for text in complaints if not any(word in text for word in usual)]


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
