"""The report in a real browser: every section is seen, nothing is fetched, nothing complains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engram
from engram.data.datasets import Dataset
from engram.data.source import Arrays
from engram.inference.evaluate import answers
from engram.model import MemoryViT
from engram.report.page import TaskPart, write_report

BLOCKS = ("curves", "confusion", "classes", "mistakes", "looks", "reads")
SIZES = {"desktop": (1200, 900), "phone": (360, 780)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two tasks, one extending the other, with names that try to break out of it."""
    torch.manual_seed(0)
    trunk = engram.random_trunk()
    trunk.source = "/a/long/path/" + "x" * 200
    model = MemoryViT(trunk)
    names = {
        "first": [  # more than a matrix shows
            "<script>alert(1)</script>",
            "a & b",
            *(f"an_unbroken_name_{i}" for i in range(23)),
        ],
        "second": ["one", "a name that is so long that it does not fit anywhere " * 3],
    }
    parts = []
    for name, classes in names.items():
        model.add_task(name, classes, extends=["first"] if name == "second" else [])
        pixels = torch.randint(0, 256, (40, 32, 32, 3), dtype=torch.uint8)
        labels, order = np.arange(40) % len(classes), np.arange(40)
        data = Dataset("noise", "test", tuple(classes), labels, Arrays(pixels, "noise"), order)
        history = [
            {"step": s, "loss": 2 / s, "val_loss": 3 / s, "val_accuracy": 1 - 1 / s}
            for s in range(1, 9)
        ]
        parts.append(TaskPart(answers(model, data, name), history))
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(path, model, parts, title="Two tasks", lead="A lead.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_whole_quiet_and_fits(
    browser: Any, report: Path, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_load_state("networkidle")

    sections = [f"{block}-{task}" for task in ("first", "second") for block in BLOCKS]
    for key in ("task-first", "task-second", "regimes", *sections):
        box = page.locator(f"[id='{key}']").bounding_box()
        assert box is not None, key
        assert box["width"] > 100, key
        assert box["height"] > 40, key
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert page.evaluate(broken) == 0
    assert page.evaluate("document.images.length") > 20
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    ink, paper = page.evaluate(
        "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
    )
    light = [sum(map(int, colour[4:-1].split(","))) / 3 for colour in (ink, paper)]
    assert light[0] - light[1] > 150 if scheme == "dark" else light[1] - light[0] > 150
    context.close()


def test_the_page_prints(browser: Any, report: Path, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    page.pdf(path=str(tmp_path / "page.pdf"), format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    page.close()
