"""The demo's report: what it measured, then a section for each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engram.images.decode import Pixels
from engram.model import MemoryViT
from engram.report.contents import Bar, Bars, IllustratedTable, Section, Table, Text
from engram.report.images import thumbnail
from engram.report.page import write_report
from engram.report.task_section import TaskPart


def write_demo_page(
    path: Path,
    model: MemoryViT,
    parts: Sequence[TaskPart],
    results: Mapping[str, Any],
    scene: Pixels,
) -> None:
    """Write the page; `scene` is the image that all tasks answered."""
    write_report(
        path,
        model,
        parts,
        title="One frozen ViT, three engrams",
        lead="pico, a small ViT that knows CIFAR-10, learned three more tasks: handwritten "
        "digits, which shape a scene shows, and how many shapes, which extends the second. Each "
        "is a file of about 30 KB.",
        first=[
            _answers(results["picture"], scene),
            _proof(results["base_identical"]),
            _timing(results["passes"]),
            _mask(results["without_mask"]),
        ],
    )


def _answers(asked: Mapping[str, Any], scene: Pixels) -> Section:
    rows = [
        (name, answer["class"], asked["truth"].get(name, "–"), f"{answer['probability']:.0%}")
        for name, answer in asked["answers"].items()
    ]
    table = Table(("task", "answer", "truth", "probability"), rows, text_columns=3)
    image = thumbnail(scene, "the scene that all tasks answered")
    contents = [IllustratedTable(image, table)]
    return Section("ask", "One image, one pass, every answer", contents)


def _proof(identical: bool) -> Section:
    text = (
        "With all tasks attached, the ViT's own answers are identical to those of the plain ViT, "
        "bit for bit."
        if identical
        else "The ViT's own answers differ from those of the plain ViT. Please report this."
    )
    return Section("proof", "The ViT did not change", [Text(text)])


def _timing(passes: Mapping[str, float]) -> Section:
    longest = max(passes["pass_per_task_ms"], passes["one_pass_ms"])
    bars = [
        Bar(label, passes[key] / longest, f"{passes[key]:.1f} ms", style)
        for key, label, style in (
            ("one_pass_ms", "one pass for all", ""),
            ("pass_per_task_ms", "a pass for each", "wrong"),
            ("plain_backbone_ms", "the plain ViT", "plain"),
        )
    ]
    text = (
        "Time per image with every task answered: the median of passes that took turns on this "
        "machine."
    )
    return Section("timing", "One pass for all", [Text(text), Bars(bars)])


def _mask(unmasked: Mapping[str, Any]) -> Section:
    bars = []
    for step in unmasked["steps"]:
        others = " and ".join(step["beside"])
        where = f"with {others}" if others else "alone"
        for key, what, style in (("with_mask", "masked", ""), ("without_mask", "no mask", "wrong")):
            bars.append(Bar(f"{where}, {what}", step[key], f"{step[key]:.1%}", style))
    text = (
        f"Test accuracy of {unmasked['task']} as other engrams are added to the same ViT. With "
        "the mask, it cannot read them. Without the mask, it reads their class tokens and cells, "
        "for which it was not trained. If the ViT's own tokens read all cells too, base changes "
        f"{unmasked['base_answers_changed']:.0%} of its answers for these images."
    )
    return Section("mask", "Without the mask", [Text(text), Bars(bars)])
