"""The report: complete, escaped, small, and readable in a browser without a network."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.reports import answered, history_of, model_with, noise, write_page
from tests.support.waiting import FUSE

import engram
from engram.errors import EngramError
from engram.inference.evaluate import answers
from engram.model import MemoryViT
from engram.report.contents import MAX_CLASSES, Links, Section
from engram.report.page import write_sections
from engram.report.run_page import MAX_IMAGES, answers_for_report
from engram.report.task_section import TaskPart, task_sections

SUBSECTIONS = ("curves", "confusion", "classes", "mistakes", "attention", "shares")
SIZES = {"desktop": (1200, 900), "phone": (360, 780)}


def test_the_page_has_every_section_and_needs_nothing_else(tmp_path: Path) -> None:
    html, found = write_page(tmp_path / "r.html", *answered(noise(12, "abc")))
    assert {f"{name}-t" for name in SUBSECTIONS} | {"task-t", "regimes"} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)
    assert found.fetched == []
    assert "script" not in found.tags
    assert "url(" not in html
    assert "@import" not in html


def test_only_the_owner_may_read_a_page_and_it_names_no_folder(tmp_path: Path) -> None:
    model, given = answered(noise(12, "abc"))
    given = replace(given, dataset=replace(given.dataset, name="/home/ann/secret/pets"))
    html, _ = write_page(tmp_path / "r.html", model, given)
    assert (tmp_path / "r.html").stat().st_mode & 0o777 == 0o600
    assert "Data: pets" in html
    assert "secret" not in html


def test_what_users_name_is_escaped(tmp_path: Path) -> None:
    nasty = ['<script>alert("1")</script>', "a & b", "'\"><img src=x onerror=alert(1)>"]
    model, given = answered(noise(12, nasty))
    html, found = write_page(tmp_path / "r.html", model, given, lead="<b>bold</b>")
    assert "script" not in found.tags
    assert "b" in found.tags  # ours, in bars
    assert "<b>bold" not in html
    assert "onerror=alert(1)>" not in html
    assert "a &amp; b" in html


def test_names_that_are_no_utf8_are_shown_as_they_can_be(tmp_path: Path) -> None:
    model = model_with("ab")
    drinks = replace(noise(8, "ab"), name=os.fsdecode(b"caf\xe9"))
    html, _ = write_page(tmp_path / "r.html", model, answers(model, drinks, "t", workers=0))
    assert "caf\\udce9" in html


def test_many_classes_and_images_make_no_large_page(tmp_path: Path) -> None:
    classes = [f"class {i}" for i in range(300)]
    model = model_with(classes)
    given = answers_for_report(model, noise(1500, classes, size=8), "t")
    assert len(given.labels) == MAX_IMAGES
    assert len(set(given.labels.tolist())) > 250  # spread over all classes
    html, _ = write_page(tmp_path / "r.html", model, given)
    assert len(html) < 500_000
    assert f"Only the {MAX_CLASSES} of 300 classes" in html
    assert f"The {MAX_CLASSES} worst of" in html


def test_large_images_are_reduced(tmp_path: Path) -> None:
    model = MemoryViT(engram.random_backbone(image_size=512, patch=64))
    model.add_task("t", 2)
    given = answers(model.eval(), noise(4, "01", size=512), "t", workers=0)
    html, _ = write_page(tmp_path / "r.html", model, given)
    assert "image/jpeg" in html
    assert 'width="160"' in html
    assert len(html) < 400_000


def test_a_path_of_this_machine_stays_here(tmp_path: Path) -> None:
    model, given = answered(noise(2, "ab"))
    model.backbone.source = "/home/somebody/secret/vit"
    html, _ = write_page(tmp_path / "r.html", model, given)
    assert "on the backbone vit," in html
    assert "somebody" not in html


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    model, given = answered(noise(2, "ab"))
    with pytest.raises(EngramError, match="cannot be written"):
        write_page(tmp_path / "none" / "r.html", model, given)


# In a browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two tasks, one extending the other, with names that try to break out of it."""
    torch.manual_seed(0)
    backbone = engram.random_backbone()
    backbone.source = "/a/long/path/" + "x" * 200
    model = MemoryViT(backbone)
    names: dict[str, Sequence[str]] = {
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
        given = answers(model, noise(40, classes), name)
        parts.append(TaskPart(given, history_of("classification")))
    path = tmp_path_factory.mktemp("page") / "report.html"
    return write_sections(path, "Two tasks", "A lead.", task_sections(model, parts), backbone)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_complete_quiet_and_fits(
    browser: Any, report: Path, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(1000 * FUSE)
    page = context.new_page()
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: messages.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_load_state("networkidle")

    sections = [f"{name}-{task}" for task in ("first", "second") for name in SUBSECTIONS]
    for key in ("task-first", "task-second", "regimes", *sections):
        box = page.locator(f"[id='{key}']").bounding_box()
        assert box is not None, key
        assert box["width"] > 100, key
        assert box["height"] > 40, key
    assert messages == []
    assert [url for url in requests if not url.startswith("data:")] == [report.as_uri()]
    broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert page.evaluate(broken) == 0
    assert page.evaluate("document.images.length") > 20
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    ink, paper = page.evaluate(
        "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
    )
    light = [np.mean([int(part) for part in colour[4:-1].split(",")]) for colour in (ink, paper)]
    assert light[0] - light[1] > 150 if scheme == "dark" else light[1] - light[0] > 150
    context.close()


def test_the_page_prints(browser: Any, report: Path, tmp_path: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(1000 * FUSE)
    page.goto(report.as_uri())
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    page.pdf(path=str(tmp_path / "page.pdf"), format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    page.close()


def test_a_page_may_be_about_no_backbone_and_lead_to_others(tmp_path: Path) -> None:
    links = Links([("flowers", "my flowers.run/report.html")])
    sections = [Section("pages", "Pages", [links])]
    html = write_sections(tmp_path / "r.html", "All", "", sections).read_text()
    assert 'href="my%20flowers.run/report.html"' in html
    assert "on the backbone" not in html
