"""`engram eval`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from engram.cli.app import Backbone, BackboneDtype, Device, Engrams, Json, Precision, Threads, app
from engram.cli.complete import among
from engram.cli.flags import DATA, OUTPUT, RESOURCES, flags_of, option
from engram.cli.progress import bars
from engram.cli.terminal import show
from engram.errors import EngramError, Notice
from engram.train.options import ColumnOptions, named, split_data
from engram.util.cpus import DECODERS, DECODERS_SHOWN
from engram.util.description import Description
from engram.util.settings import Given
from engram.util.text import counted

if TYPE_CHECKING:
    from engram.data.datasets import Splits
    from engram.inference.evaluate import Answers
    from engram.model import MemoryViT

Split = Annotated[
    str,
    option(
        DATA,
        "Split of the data: train, val or test.",
        autocompletion=among(("train", "val", "test")),
    ),
]
Workers = Annotated[
    int, option(RESOURCES, "Processes that decode images.", show_default=DECODERS_SHOWN)
]


@app.command(name="eval")
@flags_of({ColumnOptions: DATA})
def eval_command(
    sources: Engrams,
    data: Annotated[
        list[str],
        option(
            DATA,
            "A task and its data, with a split of its own if you like; repeatable.",
            metavar="NAME=DATA[:SPLIT]",
        ),
    ],
    split: Split = "test",
    backbone: Backbone = None,
    batch: Annotated[int, option(RESOURCES, "Images per pass.")] = 64,
    workers: Workers = DECODERS,
    device: Device = "auto",
    precision: Precision = "fp32",
    backbone_dtype: BackboneDtype = "fp32",
    skip_bad: Annotated[
        bool, option(DATA, "Leave unreadable images out of the count.", "--skip-bad")
    ] = False,
    report: Annotated[
        Path | None, option(OUTPUT, "Also write a page.", metavar="FILE.html")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Measure tasks on data, all of them attached together."""
    from engram.inference.evaluate import answers
    from engram.inference.load import load_model
    from engram.report.run import check_page_path
    from engram.util.processes import ProcessGroup

    if report is not None:
        check_page_path(report)  # before an hour of work, not after it
    with bars(as_json) as progress:
        progress("loading the tasks", 0, 0)
        team, model = (
            ProcessGroup(device),
            load_model(sources, backbone, backbone_dtype=backbone_dtype),
        )
        columns = ColumnOptions(**(flags or {})[ColumnOptions])
        found = [
            answers(
                model, one.splits, name, split=one.split, batch=batch, workers=workers,
                precision=precision, team=team, progress=partial(progress, name),
            )
            for name, one in _pairs(model, data, split, columns).items()
        ]  # fmt: skip
        rows = []
        if report is not None and team.main:
            progress("writing the report", 0, 0)
            rows = _write_report(report, model, found)
    metrics = {one.task: {"split": one.dataset.split, **one.metrics(skip_bad)} for one in found}
    show(_metrics_description(model, metrics, rows), as_json)


@dataclass(frozen=True)
class TaskData:
    """The data of `--data NAME=DATA:split`, for one task."""

    task: str
    splits: Splits
    split: str


def data_for(
    model: MemoryViT, tasks: Sequence[str], text: str, split: str, columns: ColumnOptions
) -> TaskData:
    """What `--data NAME=DATA:split` says; DATA alone is enough for a single task."""
    from engram.data.datasets import load

    name, rest = named(text, tasks)
    source, split = split_data(rest, split)
    if not name and len(tasks) != 1:
        raise EngramError(
            f"--data {text}: which of the tasks {', '.join(tasks)} is it for? Write "
            f"--data {next(iter(tasks), 'NAME')}={text}."
        )
    task = model.task(name or tasks[0])
    if task.spec.name not in tasks:
        raise EngramError(f"--data {text} is for none of the tasks {', '.join(tasks)}.")
    splits = load(source, split=split, like=task.spec, **columns.columns())
    if splits.unsplit:
        notice = (
            f"{source} has no splits, so all of it is measured, "
            f"{counted(len(splits[split]), 'image')}; if {task.spec.name!r} learned from them, "
            "that is no test."
        )
        warnings.warn(notice, Notice, stacklevel=2)
    return TaskData(task.spec.name, splits, split)


def _pairs(
    model: MemoryViT, data: Sequence[str], split: str, columns: ColumnOptions
) -> dict[str, TaskData]:
    pairs: dict[str, TaskData] = {}
    for text in data:
        found = data_for(model, list(model.tasks), text, split, columns)
        if found.task in pairs:
            raise EngramError(
                f"--data {text}: there is data for {found.task!r} already; evaluate on one after "
                "the other."
            )
        pairs[found.task] = found
    if not pairs:
        raise EngramError("There is nothing to evaluate on; give --data NAME=DATA.")
    return pairs


def _write_report(
    path: Path, model: MemoryViT, answers: Sequence[Answers]
) -> list[tuple[str, str]]:
    from engram.report.page import write_report
    from engram.report.task_section import TaskPart

    names = ", ".join(one.task for one in answers)
    splits = " and ".join(dict.fromkeys(one.dataset.split for one in answers))
    parts = [TaskPart(one) for one in answers]
    try:
        write_report(path, model, parts, title=f"{names}: how good on the {splits} split")
    except EngramError as error:  # what was measured is shown all the same
        return [("report", f"not written: {error}")]
    return []


def _metrics_description(
    model: MemoryViT, metrics: Mapping[str, Mapping[str, Any]], rows: list[tuple[str, str]]
) -> Description:
    from engram.tasks.metrics import shown

    wanted = [key for name in metrics for key in model.task(name).kind.columns]
    columns = tuple(dict.fromkeys([key for key in wanted if key != "loss"] + ["loss"]))
    table = tuple(
        (
            name,
            values["split"],
            f"{values['images']:,}",
            *(shown(key, values[key]) if key in values else "" for key in columns),
            str(len(values["unreadable"])),
        )
        for name, values in metrics.items()
    )
    return Description(metrics, rows, ("task", "split", "images", *columns, "unreadable"), table)
