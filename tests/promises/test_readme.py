"""What README.md and docs/ show is run as shown.

Every `python` block runs, and every line of a `console` block that starts with `$ engram `.
The blocks of one page share a folder and run in order, as a reader would run them. A block that
cannot run in a test says why, in a comment on the line above it: `<!-- not run: … -->`.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.paths import ROOT

from engram.data import arrays

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<excuse>.+?) -->\n)?```(?P<language>python|console)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: Nearly all the time is learning, image by image and epoch after epoch: less of it will do.
LESS = {
    r"\bepochs(=| = | )\d+": r"epochs\g<1>1",
    r"\[:600\]": "[:150]",
    r"\[600:900\]": "[600:650]",
    r"\brange\(200\)": "range(60)",
    r"\bi \+ 400\b": "i + 200",
    r"\brange\(120\)": "range(60)",
}
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#\s]+)")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int

    def commands(self) -> list[list[str]]:
        """The `engram` commands of a console block, as arguments."""
        whole_lines = self.text.replace("\\\n", " ")
        return [
            shlex.split(line.removeprefix("$ engram "), comments=True)
            for line in whole_lines.splitlines()
            if line.startswith("$ engram ")
        ]


def blocks_to_run(markdown: str) -> list[Block]:
    return [
        Block(
            found["language"], found["text"], line=markdown.count("\n", 0, found.start("text")) + 1
        )
        for found in BLOCK.finditer(markdown)
        if not found["excuse"]
    ]


@pytest.fixture(scope="module")
def common_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features that one page computed, the next one need not."""
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Less than a quarter of the bundled digits: about 320 to train on, and 80 to test."""
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    with np.load(arrays.DIGITS) as digits:
        np.savez(path, **{name: digits[name][:400] for name in digits})
    return path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_shown(
    page: Path,
    common_cache: Path,
    few_digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    nursery: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGRAM_CACHE", str(common_cache))
    monkeypatch.setattr(arrays, "DIGITS", few_digits)
    fewer = (
        f"from engram.data import arrays; arrays.DIGITS = type(arrays.DIGITS)({str(few_digits)!r})"
    )
    names: dict[str, object] = {"__name__": "__main__"}
    text = page.read_text(encoding="utf-8")
    for more, less in LESS.items():
        text = re.sub(more, less, text)
    for block in blocks_to_run(text):
        if block.language == "python":
            # The page's own line numbers, so a traceback points into the page.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(page), "exec"), names)
        for command in block.commands():
            done = nursery.run(*command, cwd=tmp_path, before=fewer)
            assert done.code == 0, f"{page.name}: engram {shlex.join(command)}: {done.stderr}"
            assert "Traceback" not in done.stderr
    assert "Traceback" not in capfd.readouterr().err


def test_the_readme_has_an_example() -> None:
    blocks = blocks_to_run((ROOT / "README.md").read_text(encoding="utf-8"))
    assert any(block.language == "python" for block in blocks)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = [found["target"] for found in LINK.finditer(page.read_text(encoding="utf-8"))]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_blocks_are_found_as_documented() -> None:
    page = "\n".join(
        [
            "```python",
            "x = 1",
            "```",
            "```console",
            "$ make test",
            "$ engram compose a b \\",
            "    -o out/  # a comment",
            "some output",
            "```",
            "<!-- not run: needs the Hub -->",
            "```console",
            "$ engram inspect missing",
            "```",
            "```text",
            "$ engram not-a-command",
            "```",
        ]
    )
    python, console = blocks_to_run(page)
    assert (python.text, python.line) == ("x = 1\n", 2)
    assert console.commands() == [["compose", "a", "b", "-o", "out/"]]
