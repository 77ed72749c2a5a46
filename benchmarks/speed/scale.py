"""An estimate for a billion images and a thousand tasks, by formulas from the measured numbers.

    python -m benchmarks.speed.scale --images 1e9 --tasks 1000 --cores 64 --epochs 10

prints the tables of docs/scale.md; `python -m benchmarks.speed` writes them there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.paths import RESULTS
from benchmarks.report import markdown_table
from benchmarks.speed.page import Found, pick

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Job:
    """The amount of work and the machines: the only numbers here that were not measured."""

    images: float = 1e9
    tasks: int = 1000
    epochs: int = 10
    batch: int = 512  # images per training step, over all machines of a task
    cores: int = 64  # per machine
    disk: float = 3e9  # bytes per second that a machine reads
    network: float = 1.25e9  # bytes per second between machines
    answer: int = 4  # bytes of one answer: two for a class number, two for a probability
    hours: float = 24.0  # time to finish in


@dataclass(frozen=True)
class Measured:
    """Core-seconds per image, and bytes."""

    backbone: str
    threads: int
    decode: float
    plain: float
    tasks_fixed: float  # a pass costs tasks_fixed + tasks * per_task
    per_task: float
    most_tasks: int
    lora: float  # a pass of one task
    step: float
    cached: float
    lora_step: float
    variants: int
    sweep: float
    row: int
    photo: int
    engram: int
    lora_file: int
    model_file: int


def measured(found: Found) -> Measured:
    """The inputs of the formulas, from the documents of a run."""
    machine = found["forward"]["machine"]
    threads = machine["threads"]
    growth = found["growth"]["of"]["tasks"]
    batch = pick_batch(growth["about"])
    points = growth["points"]
    line = statistics.linear_regression([p["x"] for p in points], [p["seconds"] for p in points])
    per_image = threads / batch
    plain = growth["plain_seconds"] * per_image
    forward, training = found["forward"]["rows"], found["training"]["rows"]
    large = max(row["batch"] for row in forward)

    def ratio(rows: list[Any], default: float = float("nan"), **wanted: Any) -> float:
        row = pick(rows, **wanted)
        return default if row is None else float(row["ratio"])

    def stored(start: str) -> int:
        rows = found["storage"]["rows"]
        return next((row["bytes"] for row in rows if row["what"].startswith(start)), 0)

    cached = [r for r in training if r["what"] == "engram, from the cache"]
    sweep = [r for r in found["sweep"]["rows"] if r["backbone"] == found["forward"]["backbone"]]
    many = pick(sweep, what="engram, one pass")
    assert many is not None
    return Measured(
        backbone=found["forward"]["backbone"],
        threads=threads,
        decode=found["decoding"]["seconds"],
        plain=plain,
        tasks_fixed=line.intercept * per_image,
        per_task=line.slope * per_image,
        most_tasks=points[-1]["x"],
        lora=plain * ratio(forward, what="PEFT LoRA", tasks=1, batch=large),
        step=plain * ratio(training, what="engram"),
        cached=plain * max(cached, key=lambda row: row["batch"])["ratio"],
        lora_step=plain * ratio(training, what="PEFT LoRA"),
        variants=many["tasks"],
        sweep=plain * many["ratio"],
        row=found["storage"]["cache_row"],
        photo=found["decoding"]["bytes"],
        engram=stored("engram"),
        lora_file=stored("PEFT"),
        model_file=stored("separate"),
    )


def pick_batch(about: str) -> int:
    found = re.search(r"batch (\d+)", about)
    assert found is not None
    return int(found[1])


# The tables


def tables(found: Found, job: Job | None = None) -> str:
    """Markdown: what was measured, what follows from it, and where the bottlenecks are."""
    job, m = job or Job(), measured(found)
    return "\n".join(
        [
            *_measured_lines(found, m),
            "",
            *_answering(job, m),
            "",
            *_training(job, m),
            "",
            *_bytes(job, m),
        ]
    )


def _measured_lines(found: Found, m: Measured) -> list[str]:
    about = found["forward"]["machine"]
    small = [name for name, section in found.items() if section["plan"] != "full"]
    quick = (
        f" **Not valid as results: {', '.join(small)} came from a quick run on a smaller "
        "backbone.**"
        if small
        else ""
    )
    rows = [
        ("decode", f"one JPEG of {m.photo / 1e3:.0f} KB to pixels", m.decode),
        ("plain", f"the plain {m.backbone}", m.plain),
        ("fixed", f"a pass with tasks: its fixed part (linear fit of 1 to {m.most_tasks} tasks)",
         m.tasks_fixed),
        ("per_task", "a pass with tasks: what each task adds", m.per_task),
        ("lora", "a pass of one LoRA adapter", m.lora),
        ("step", "a training step of one task, with the backbone's forward pass", m.step),
        ("cached", "a training step of one task from the cache", m.cached),
        ("sweep", f"a training step of {m.variants} variants from the cache", m.sweep),
        ("lora_step", "a training step of LoRA", m.lora_step),
    ]  # fmt: skip
    lines = [
        f"Measured on {about['processor']}, {m.threads} threads, torch {about['torch']}; "
        f"core-seconds are seconds times threads.{quick}",
        "",
    ]
    table = [
        [f"`{name}`", words, f"{1e3 * value:.2f}"]
        for name, words, value in rows
        if not math.isnan(value)
    ]
    return [*lines, *markdown_table(("", "work per image", "core-ms"), table)]


def _hours(rows: Sequence[tuple[str, str, float]], job: Job) -> list[str]:
    """A table of what each method costs; methods that were not measured are left out."""
    machines = f"machines of {job.cores} cores for {job.hours:g} h"
    table = []
    for what, formula, seconds in rows:
        if not math.isnan(seconds):
            hours = job.images * seconds / 3600
            needed = _machines(hours / job.cores / job.hours)
            table.append([what, f"`{formula}`", f"{hours:,.0f}", needed])
    return markdown_table(("", "core-seconds per image", "core-hours", machines), table)


def _machines(count: float) -> str:
    return f"{count:,.1f}" if count < 10 else f"{count:,.0f}"


def _answering(job: Job, m: Measured) -> list[str]:
    tasks, images = job.tasks, job.images
    one_pass = m.tasks_fixed + tasks * m.per_task
    rows = [
        ("decoding", "decode", m.decode),
        ("all tasks in one pass", "fixed + tasks * per_task", one_pass),
        ("as separate models", "tasks * plain", tasks * m.plain),
        ("as LoRA adapters", "tasks * lora", tasks * m.lora),
    ]
    lines = [f"**Answers of {tasks:,} tasks for {images:,.0f} images.**", "", *_hours(rows, job)]
    share = tasks * m.per_task / one_pass
    slowest = "the tasks' own tokens" if share > 0.5 else "the backbone"
    feeding = m.decode / one_pass
    rate = job.cores / (one_pass + m.decode)  # images per second of a machine
    return [
        *lines,
        "",
        f"The bottleneck is {slowest}: the tasks are {share:.0%} of the pass. Decoding costs "
        f"{feeding:.1%} of the pass, so one core in {1 / feeding + 1:,.0f} decodes. One pass needs "
        f"{tasks * m.plain / one_pass:,.1f} times fewer machines than separate models. Per second, "
        f"a machine reads {rate * m.photo / 1e6:,.1f} MB of photographs and writes "
        f"{rate * tasks * job.answer / 1e6:,.2f} MB of answers.",
    ]


def _training(job: Job, m: Measured) -> list[str]:
    images, epochs = job.images, job.epochs
    fill = m.decode + m.plain
    rows = [
        (
            "with the backbone's forward pass",
            "epochs * (decode + step)",
            epochs * (m.decode + m.step),
        ),
        ("filling the cache", "decode + plain", fill),
        ("training from the cache", "epochs * cached", epochs * m.cached),
        (f"{m.variants} variants of each", "epochs * sweep", epochs * m.sweep),
        ("LoRA", "epochs * (decode + lora_step)", epochs * (m.decode + m.lora_step)),
    ]
    each = f"{images / job.tasks:,.0f} images each, {epochs} epochs"
    lines = [f"**Training of {job.tasks:,} tasks, {each}.**", "", *_hours(rows, job)]
    rate = job.cores / m.cached * m.row  # bytes per second that the cores of a machine could use
    by_disk = images * epochs * m.row / job.disk / 3600
    by_cores = images * epochs * m.cached / job.cores / 3600
    saved = m.decode + m.step - m.cached  # in every epoch
    pays = (
        f"the cache pays off from {fill / saved:,.1f} epochs on"
        if saved > 0
        else "the cache never pays off"
    )
    parameters = m.engram  # bytes, nearly all of which are fp32 parameters
    step_time = job.batch * m.cached / job.cores
    share = 2 * parameters / job.network / step_time
    if rate > job.disk:
        bottleneck = (
            f"the disk: the cores of a machine could use {rate / 1e9:,.1f} GB/s, and its disk "
            f"reads {job.disk / 1e9:g}. At the speed of the disk it takes {by_disk:,.0f} "
            f"machine-hours instead of {by_cores:,.0f}; {m.variants} variants in one pass read the "
            f"data once and need {job.cores / m.sweep * m.row / 1e9:,.1f} GB/s"
        )
    else:
        bottleneck = (
            f"computation: the cores of a machine use {rate / 1e9:,.2f} GB/s, and its disk reads "
            f"{job.disk / 1e9:g}"
        )
    return [
        *lines,
        "",
        f"Counting computation only, {pays} "
        "(`(decode + plain) / (decode + step - cached)`). From the cache the bottleneck is "
        f"{bottleneck}. Data-parallel processes exchange {2 * parameters / 1e3:,.0f} KB per step "
        f"(`2 * engram`); at {8 * job.network / 1e9:g} Gbit/s this takes {share:.2%} of the time "
        f"of a step of {job.batch} images on one machine.",
    ]


def _bytes(job: Job, m: Measured) -> list[str]:
    tasks, images = job.tasks, job.images
    rows = [
        ("photographs", "images * photo", images * m.photo),
        ("answers", f"images * tasks * {job.answer}", images * tasks * job.answer),
        ("cache", "images * row", images * m.row),
        ("reading the cache", "epochs * images * row", job.epochs * images * m.row),
        ("engrams", "tasks * engram", tasks * m.engram),
        ("LoRA adapters", "tasks * lora_file", tasks * m.lora_file),
        ("separate models", "tasks * model_file", tasks * m.model_file),
    ]
    lines = [
        f"**Bytes** (`photo` {m.photo / 1e3:.0f} KB, `row` {m.row / 1e3:,.0f} KB, `engram` "
        f"{m.engram / 1e3:.0f} KB, `lora_file` {m.lora_file / 1e3:,.0f} KB, `model_file` "
        f"{m.model_file / 1e6:,.0f} MB).",
        "",
    ]
    table = [[what, f"`{formula}`", _size(value)] for what, formula, value in rows if value]
    return [*lines, *markdown_table(("", "formula", "size"), table)]


def _size(count: float) -> str:
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count / 1e3:,.1f} KB"


def filled(text: str, found: Found) -> str:
    """The page with its tables generated again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(found)}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.scale")
    for setting in fields(Job):
        default: Any = setting.default
        parser.add_argument(f"--{setting.name}", type=float, default=float(default))
    given = vars(parser.parse_args())
    measurements = sorted((RESULTS / "speed").glob("*.json"))
    documents = {file.stem: json.loads(file.read_text()) for file in measurements}
    integers = {name: int(given[name]) for name in ("tasks", "epochs", "batch", "cores", "answer")}
    print(tables(documents, Job(**{**given, **integers})))
