"""Answers of the exported page in chromium, beside those of Engram on the same photographs.

    python -m benchmarks.web

A page of the ViT-Ti with its own 1,000 classes is exported with weights in float16, int8 and
float32, and asked about 50 photographs, as the model is. Into benchmarks/results/web.md. Three
minutes. It needs chromium and `make web-runtime`.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from scripts.fetch_web_runtime import fetch
from tests.support.web import StaticHost, answered, opened

import engram
from benchmarks.paths import ASSETS, BACKBONE, require_backbone
from benchmarks.report import markdown_table, write_report
from engram.export import export_web
from engram.export.web import WEIGHTS

PHOTOGRAPHS = 50
TOP = 5  # classes that the page shows


def photographs() -> list[Path]:
    """Evenly spaced ones of the test images of two datasets."""
    found = []
    for name in ("pets", "flowers"):
        paths = sorted(p for p in (ASSETS / "data" / name / "test").rglob("*") if p.is_file())
        found += paths[:: len(paths) // (PHOTOGRAPHS // 2)][: PHOTOGRAPHS // 2]
    return found


def measure(page: Any, weights: str, folder: Path, paths: list[Path]) -> list[str]:
    """A row of the table."""
    model = engram.MemoryViT(engram.load_backbone(BACKBONE)).eval()
    made = export_web(model, folder / "page", weights=weights, runtime=fetch(Path(sys.prefix)))
    expected = engram.predict(model, paths, top_k=1000)
    same, largest, seconds = 0, 0.0, []
    with StaticHost(folder) as host:
        began = time.perf_counter()
        opened(page, f"{host.address}page/")
        loading = time.perf_counter() - began
        for path, answer in zip(paths, expected, strict=True):
            began = time.perf_counter()
            rows = answered(page, path)["base"]["rows"]
            seconds.append(time.perf_counter() - began)
            known = {one["class"]: one["probability"] for one in answer["tasks"]["base"]}
            same += rows[0]["label"] == answer["tasks"]["base"][0]["class"]
            largest = max(largest, *(abs(row["share"] - known[row["label"]]) for row in rows))
    return [
        weights,
        f"{made.model_bytes / 1e6:.1f} MB",
        f"{same} of {len(paths)}",
        f"{largest:.4f}",
        f"{loading:.1f} s",
        f"{seconds[0]:.2f} s",
        f"{statistics.median(seconds):.2f} s",
    ]


def main() -> None:
    require_backbone()
    paths, rows = photographs(), []
    with sync_playwright() as play:
        program = shutil.which("chromium")
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for weights in WEIGHTS:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(browser.new_page(), weights, Path(folder), paths))
        browser.close()
    columns = (
        *("weights", "size", "same first class", "largest difference of a probability"),
        *("loaded in", "first answer", "median of all answers"),
    )
    lines = [
        f"The page in chromium (WebAssembly, one thread), beside the model in PyTorch and float32, "
        f"on {len(paths)} photographs of pets and flowers, with a ViT-Ti/16 and its own 1,000 "
        f"classes. The difference is over the {TOP} classes that the page shows.",
        "",
        *markdown_table(columns, rows),
    ]
    write_report("web", "The exported page", lines)


if __name__ == "__main__":
    main()
