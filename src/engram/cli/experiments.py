"""Commands that show or measure: demo, bench, reproduce."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.app import ImageSize, Json, app
from engram.cli.flags import DATA, TRAINING, Given, flags_of, numbers
from engram.cli.options import ColumnOptions, recipe_from
from engram.cli.terminal import bars, show, show_document, steps
from engram.train.recipe import RECIPES, Recipe


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("demo"),
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the pictures and of initialisation.")
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
        typer.Option(metavar="TRUNK", help="Path or Hub id of the backbone; pico if not given."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="ViT-B/32", help="Or a shape with random weights, in place of a backbone."
        ),
    ] = None,
    tasks: Annotated[str, typer.Option(metavar="A,B", help="Numbers of tasks.")] = "1,10,100",
    batch: Annotated[str, typer.Option(metavar="A,B", help="Batch sizes.")] = "1,16",
    cells: Annotated[int, typer.Option(help="Memory cells at every layer.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds per table; more gives less noise.")] = 5.0,
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch, if not its own choice.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the speed of tasks against the plain trunk and against other methods."""
    from engram.experiments.bench import bench

    counts, batches = numbers("--tasks", tasks, int), numbers("--batch", batch, int)
    with steps(as_json) as say:
        result = bench(
            backbone, shape=shape, tasks=counts, batches=batches, cells=cells, seconds=seconds,
            threads=threads, say=say,
        )  # fmt: skip
    show(result, as_json)


@app.command(name="reproduce")
@flags_of({ColumnOptions: DATA, Recipe: TRAINING}, RECIPES["paper"])
def reproduce_command(
    dataset: Annotated[
        str, typer.Option("--dataset", metavar="DATA", help="A preset such as cifar100, or data.")
    ],
    backbone: Annotated[
        str, typer.Option("--backbone", metavar="TRUNK", help="Path or Hub id of the backbone.")
    ] = "google/vit-base-patch32-224-in21k",
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The folder to write; run again to continue.")
    ] = Path("reproduce"),
    table: Annotated[str, typer.Option(help="Which rows: 2, 4, poster or 2b.")] = "2",
    lr: Annotated[
        str, typer.Option("--lr", metavar="A,B", help="Learning rates, in place of the usual grid.")
    ] = "",
    seeds: Annotated[int, typer.Option(help="Seeds for every learning rate.")] = 1,
    image_size: ImageSize = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained, and stop.")
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
