"""Commands that show or measure: demo, bench, reproduce."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.app import Device, ImageSize, Json, app
from engram.cli.complete import among
from engram.cli.flags import (
    DATA,
    MODEL,
    OUTPUT,
    RESOURCES,
    TASK,
    TRAINING,
    flags_of,
    numbers,
)
from engram.cli.progress import bars
from engram.cli.terminal import show, show_document
from engram.train.options import ColumnOptions, recipe_from
from engram.train.recipe import RECIPES, Recipe
from engram.util.settings import Given


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write.", rich_help_panel=OUTPUT)] = Path(
        "demo"
    ),
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Random seed of the pictures and of initialisation.",
            rich_help_panel=TRAINING,
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Train three tasks on one small ViT, compose them, and check every promise."""
    from rich.console import Console

    from engram.experiments.demo import run_demo

    console = Console(quiet=as_json, emoji=False)
    results = run_demo(out, seed=seed, console=console, bars=partial(bars, as_json))
    if as_json:
        show_document(results)


@app.command(name="bench")
def bench_command(
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="BACKBONE",
            help="Path or Hub id of the backbone; pico if not given.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="ViT-B/32",
            help="Or a shape with random weights, in place of a backbone.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(metavar="A,B", help="Numbers of tasks.", rich_help_panel=TASK)
    ] = "1,10,100",
    batch: Annotated[
        str, typer.Option(metavar="A,B", help="Batch sizes.", rich_help_panel=RESOURCES)
    ] = "1,16",
    cells: Annotated[
        int, typer.Option(help="Memory cells at every layer.", rich_help_panel=TASK)
    ] = 5,
    seconds: Annotated[
        float,
        typer.Option(help="Seconds per table; more gives less noise.", rich_help_panel=RESOURCES),
    ] = 5.0,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of torch, if not its own choice.", rich_help_panel=RESOURCES),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure the speed of tasks against the plain backbone and against other methods."""
    from engram.experiments.bench import bench

    counts, batches = numbers("--tasks", tasks, int), numbers("--batch", batch, int)
    with bars(as_json) as progress:
        result = bench(
            backbone, shape=shape, tasks=counts, batches=batches, cells=cells, seconds=seconds,
            threads=threads, device=device, say=lambda text: progress("measuring", 0, 0, text),
        )  # fmt: skip
    show(result, as_json)


@app.command(name="reproduce")
@flags_of({ColumnOptions: DATA, Recipe: TRAINING}, RECIPES["paper"])
def reproduce_command(
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="DATA",
            help="A preset such as cifar100, or data.",
            rich_help_panel=DATA,
        ),
    ],
    backbone: Annotated[
        str,
        typer.Option(
            "--backbone",
            metavar="BACKBONE",
            help="Path or Hub id of the backbone.",
            rich_help_panel=TASK,
        ),
    ] = "google/vit-base-patch32-224-in21k",
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            help="The folder to write; run again to continue.",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("reproduce"),
    table: Annotated[
        str,
        typer.Option(
            help="Which rows: 2, 4, poster or 2b.",
            autocompletion=among(("2", "4", "poster", "2b")),
            rich_help_panel=TASK,
        ),
    ] = "2",
    lr: Annotated[
        str,
        typer.Option(
            "--lr",
            metavar="A,B",
            help="Learning rates, in place of the usual grid.",
            rich_help_panel=TRAINING,
        ),
    ] = "",
    seeds: Annotated[
        int, typer.Option(help="Seeds for every learning rate.", rich_help_panel=TRAINING)
    ] = 1,
    image_size: ImageSize = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what would be trained, and stop.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Train a table of the paper with its own recipe, and print it next to the paper's figures."""
    from engram.data.datasets import load
    from engram.experiments.reproduce import plan, reproduce

    recipe, lrs = recipe_from("paper", (flags or {})[Recipe]), numbers("--lr", lr, float)
    if dry_run:
        show(plan(dataset, table, recipe, lrs, seeds), as_json)
        return
    with bars(as_json) as progress:
        columns = ColumnOptions(**(flags or {})[ColumnOptions])
        result = reproduce(
            dataset, backbone, out, table=table, recipe=recipe, lrs=lrs, seeds=seeds,
            image_size=image_size, splits=load(dataset, **columns.columns()), progress=progress,
        )  # fmt: skip
    show(result, as_json)
