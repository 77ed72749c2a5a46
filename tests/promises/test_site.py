"""The documentation builds without a warning and is read without a network, on a phone as well."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT
from tests.support.waiting import FUSE

PAGES = ("index", "results", "reference", "commands", "architecture", "training", "scale")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    mkdocs = shutil.which("mkdocs", path=str(Path(sys.executable).parent))
    assert mkdocs, "mkdocs is not installed: run make setup"
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)", text)
        fetched += re.findall(r"<link\b(?![^>]*canonical)[^>]*\bhref=[\"']?([^\"'\s>]+)", text)
        assert fetched
        assert not [url for url in fetched if re.match(r"(https?:)?//", url)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_the_reference_shows_signatures_and_arguments(site: Path) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")
    assert 'id="engram.MemoryViT.add_task"' in page
    assert "Memory cells at every layer" in page


@pytest.fixture
def phone(site: Path, browser: Any) -> Iterator[Any]:
    """A browser as wide as a phone, without a network."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, offline=True)
    context.set_default_timeout(1000 * FUSE)
    yield context
    context.close()


def test_pages_open_from_the_disk_without_a_network_and_no_wider_than_a_phone(
    site: Path, phone: Any
) -> None:
    """A table or a block of code that is wider scrolls inside itself."""
    requests, errors = [], []
    phone.on("request", lambda request: requests.append(request.url))
    phone.on("weberror", lambda error: errors.append(str(error.error)))
    phone.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    pages = [phone.new_page() for _ in PAGES]
    for page, name in zip(pages, PAGES, strict=True):
        page.goto(f"file://{site}/{name}.html")
    for page, name in zip(pages, PAGES, strict=True):  # they load side by side
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
    assert len(requests) > len(PAGES)
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert errors == []


def test_the_search_works_from_the_disk(site: Path, phone: Any) -> None:
    page = phone.new_page()
    page.goto(f"file://{site}/index.html?q=fingerprint")
    result = page.locator(".md-search-result__link").first
    result.wait_for(state="attached")
    assert page.locator(".md-search-result__link[href*='backbones.html']").count()


def test_dark_mode_follows_the_system_and_can_be_chosen(site: Path, browser: Any) -> None:
    context = browser.new_context(color_scheme="dark", offline=True)
    context.set_default_timeout(1000 * FUSE)
    page = context.new_page()
    page.goto(f"file://{site}/index.html")
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    page.locator("label[title='Use light mode']").click()
    assert page.evaluate("document.body.dataset.mdColorScheme") == "default"
    context.close()
