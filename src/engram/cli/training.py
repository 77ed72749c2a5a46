"""`engram fit`, `engram sweep` and `engram cache`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.app import ImageSize, Json, Overwrite, Trunk, app
from engram.cli.flags import DATA, OUTPUT, TASK, TRAINING, Given, flags_of, numbers
from engram.cli.options import DataOptions, named, recipe_from
from engram.cli.terminal import bars, show
from engram.errors import EngramError
from engram.tasks.settings import TaskSettings
from engram.train.recipe import Recipe
from engram.util.description import Description

if TYPE_CHECKING:
    from engram.model import MemoryViT
    from engram.tasks.kinds import Kind
    from engram.train.fit import Result
    from engram.train.sweep import SweepResult

Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help="A folder, a table, .npz, hf:NAME, digits or a preset."),
]
Out = Annotated[
    Path, typer.Option("-o", "--out", help="The engram to write.", rich_help_panel=OUTPUT)
]
TaskName = Annotated[str, typer.Option("--task", help="Name of the task.", rich_help_panel=TASK)]
RecipeName = Annotated[
    str,
    typer.Option(
        "--recipe", help="Settings to start from: default or paper.", rich_help_panel=TRAINING
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue an interrupted run.", rich_help_panel=TRAINING),
]
Test = Annotated[
    bool,
    typer.Option("--test", help="Evaluate the test split once, at the end.", rich_help_panel=DATA),
]
_PANELS = {DataOptions: DATA, TaskSettings: TASK, Recipe: TRAINING}


@app.command(name="fit")
@flags_of(_PANELS)
def fit_command(
    data: Data,
    task: TaskName,
    out: Out,
    backbone: Trunk = "pico",
    image_size: ImageSize = None,
    seeds: Annotated[
        int,
        typer.Option(help="Train this many seeds and keep the best.", rich_help_panel=TRAINING),
    ] = 1,
    recipe: RecipeName = "default",
    resume: Resume = False,
    overwrite: Overwrite = False,
    test: Test = False,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Train a task on images and write it as an engram."""
    from engram.report.run import write_run_report
    from engram.train.fit import fit
    from engram.train.sweep import sweep
    from engram.util.processes import Team

    given = flags or {}
    settings, training = TaskSettings(**given[TaskSettings]), recipe_from(recipe, given[Recipe])
    with bars(as_json) as progress:
        team, splits = Team(), DataOptions(**given[DataOptions]).load(data)
        model, parents = _start(backbone, image_size, settings)
        result: Result | SweepResult
        if seeds != 1:
            result = sweep(
                model, task, splits, training,
                cells=[settings.cells], seeds=seeds, regime=settings.regime, extends=parents,
                update=settings.update, adapter_width=settings.adapter_width,
                class_init=settings.class_init,
                out=out, resume=resume, overwrite=overwrite, test=test, team=team,
                progress=progress,
            )  # fmt: skip
        else:
            spec = splits.task_spec(task, settings.with_parents(parents))
            model.add(spec, class_init=settings.class_init, seed=training.seed)
            result = fit(
                model, task, splits, training,
                out=out, resume=resume, overwrite=overwrite, test=test, team=team,
                progress=progress,
            )  # fmt: skip
        report = write_run_report(model, result, splits, training) if team.main else ""
    rows = _result_rows(result, model.task(task).kind)
    if splits.ignored:
        rows.append(("ignored", f"{splits.ignored} files that are no images"))
    document = {**result.to_dict(), "report": report}
    show(Description(document, [*rows, ("report", report)]), as_json)


@app.command(name="sweep")
@flags_of(_PANELS)
def sweep_command(
    data: Data,
    task: TaskName,
    out: Out,
    backbone: Trunk = "pico",
    image_size: ImageSize = None,
    cells: Annotated[
        str, typer.Option(metavar="A,B", help="Numbers of memory cells.", rich_help_panel=TASK)
    ] = "5",
    lr: Annotated[
        str,
        typer.Option("--lr", metavar="A,B", help="Learning rates.", rich_help_panel=TRAINING),
    ] = "",
    weight_decay: Annotated[
        str, typer.Option(metavar="A,B", help="Weight decays.", rich_help_panel=TRAINING)
    ] = "",
    seeds: Annotated[
        int, typer.Option(help="Seeds for every combination.", rich_help_panel=TRAINING)
    ] = 1,
    recipe: RecipeName = "default",
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help="Train the best again, validation images included.",
            rich_help_panel=TRAINING,
        ),
    ] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    test: Test = False,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Train many variants of a task at once and keep the best on validation."""
    from engram.report.run import write_run_report
    from engram.train.sweep import sweep
    from engram.util.processes import Team

    given = flags or {}
    settings, training = TaskSettings(**given[TaskSettings]), recipe_from(recipe, given[Recipe])
    lrs, counts = numbers("--lr", lr, float), numbers("--cells", cells, int)
    weight_decays = numbers("--weight-decay", weight_decay, float)
    with bars(as_json) as progress:
        team, splits = Team(), DataOptions(**given[DataOptions]).load(data)
        model, parents = _start(backbone, image_size, settings)
        result = sweep(
            model, task, splits, training,
            lrs=lrs, cells=counts, weight_decays=weight_decays, seeds=seeds,
            regime=settings.regime, extends=parents, update=settings.update,
            adapter_width=settings.adapter_width, class_init=settings.class_init,
            out=out, resume=resume, overwrite=overwrite, refit=refit, test=test, team=team,
            progress=progress,
        )  # fmt: skip
        report = write_run_report(model, result, splits, training, refit) if team.main else ""
    show(_sweep_description(result, model.task(task).kind, report), as_json)


def _start(
    backbone: str, image_size: int | None, settings: TaskSettings
) -> tuple[MemoryViT, list[str]]:
    """The trunk with the engrams of --extends attached, and their names."""
    from engram.model import MemoryViT
    from engram.trunks.load import load_trunk

    model = MemoryViT(load_trunk(backbone, image_size=image_size))
    names = []
    for text in settings.extends:
        given, path = named(text)
        task = model.attach(path)
        if given and given != task.spec.name:
            raise EngramError(
                f"--extends {text}: the engram in {path} is called {task.spec.name!r}, not "
                f"{given!r}; write --extends {task.spec.name}={path}."
            )
        names.append(task.spec.name)
    return model, names


def _result_rows(result: Result | SweepResult, kind: Kind) -> list[tuple[str, str]]:
    rows = [
        ("engram", str(result.path)),
        ("regime", result.regime),
        ("parameters", f"{result.parameters:,}"),
        ("seconds", f"{result.seconds:.0f}"),
    ]
    for split, metrics in result.metrics.items():
        score = f"{kind.shown(metrics[kind.score])} of {metrics['images']:,}"
        rows.append((f"{split} {kind.title}", score))
        if metrics.get("deviation"):
            spread = f"{kind.shown(metrics['mean'])} ± {kind.shown(metrics['deviation'])}"
            rows.append(("over seeds", spread))
    if result.unreadable:
        rows.append(("unreadable", f"{len(result.unreadable)} images, listed beside the engram"))
    return rows


def _sweep_description(result: SweepResult, kind: Kind, report: str) -> Description:
    table = tuple(
        (
            f"{setting.lr:g}",
            str(setting.cells),
            f"{setting.weight_decay:g}",
            f"{kind.shown(setting.mean)} ± {kind.shown(setting.deviation)}",
            "best" if setting == result.best else "",
        )
        for setting in result.settings
    )
    columns = ("lr", "cells", "weight decay", f"validation {kind.title}", "")
    rows = [*_result_rows(result, kind), ("report", report)]
    return Description({**result.to_dict(), "report": report}, rows, columns, table)


# The cache

cache_app = typer.Typer(
    help="The cache of the trunk's tokens, which masked tasks train from.", no_args_is_help=True
)
app.add_typer(cache_app, name="cache")


@cache_app.command(name="info")
def cache_info(as_json: Json = False) -> None:
    """Print where the cache is and what it holds."""
    from engram.train.cache import default_root, info

    entries = info()
    table = tuple(
        (
            entry["trunk"],
            f"{entry['images']:,}",
            f"{entry['bytes'] / 1e9:.2f} GB",
            "x".join(map(str, entry["preprocessing"]["size"])),
            entry["view"]["augment"],
        )
        for entry in entries
    )
    document = {"folder": str(default_root()), "caches": entries}
    rows = [("folder", str(default_root())), ("caches", str(len(entries)))]
    columns = ("trunk", "images", "size", "pixels", "view")
    show(Description(document, rows, columns, table), as_json)


@cache_app.command(name="clear")
def cache_clear(as_json: Json = False) -> None:
    """Remove everything from the cache."""
    from engram.train.cache import clear

    freed = clear()
    show(Description({"freed": freed}, [("freed", f"{freed / 1e9:.2f} GB")]), as_json)
