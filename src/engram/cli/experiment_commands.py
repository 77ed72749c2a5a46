"""Commands that show or measure: demo, bench, reproduce."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from engram.cli import shared
from engram.cli.flags import among, numbers, option, out_option, switch
from engram.cli.terminal import Watch, bars
from engram.methods.method_flags import MethodFlags
from engram.train.options import ColumnOptions, recipe_from
from engram.train.recipe import RECIPES, Recipe
from engram.util.settings import Given
from engram.util.text import Description


@shared.command("demo", threads=True)
def demo(
    out: Path = option("Output", "The folder to write.", default=Path("demo")),
    seed: int = option(
        "Training", "Random seed of the pictures and of initialisation.", default=0, min=0
    ),
    *,
    as_json: bool,
) -> Description:
    """Train three tasks on one small ViT, compose them, and check every promise."""
    from rich.console import Console

    from engram.experiments.demo import run_demo

    console = Console(quiet=as_json, emoji=False)
    results = run_demo(out, seed=seed, console=console, bars=partial(bars, as_json))
    return Description(results, [])  # people have been told already


@shared.command("bench", threads=True)
def bench_command(
    backbone: str | None = option(
        "Model", "Path or Hub id of the backbone; pico if not given.", metavar="BACKBONE"
    ),
    shape: str | None = option(
        "Model", "Or a shape with random weights, in place of a backbone.", metavar="ViT-B/32"
    ),
    tasks: str = option("Task", "Numbers of tasks.", default="1,10,100", metavar="A,B"),
    batch: str = option("Resources", "Batch sizes.", default="1,16", metavar="A,B"),
    cells: int = option("Task", "Memory cells at every layer.", default=MethodFlags().cells),
    seconds: float = option("Resources", "Seconds per table; more gives less noise.", default=5.0),
    device: str = shared.DEVICE,
    *,
    progress: Watch,
) -> Description:
    """Measure the speed of tasks against the plain backbone and against separate models."""
    from engram.experiments.bench import BenchSettings, bench

    counts, batches = numbers("--tasks", tasks, int), numbers("--batch", batch, int)
    settings = BenchSettings(backbone, shape, counts, batches, cells, seconds, device)
    return bench(settings, say=lambda text: progress("measuring", 0, 0, text))


@shared.command(
    "reproduce", {ColumnOptions: "Data", Recipe: "Training"}, RECIPES["paper"], threads=True
)
def reproduce_command(
    dataset: str = option(
        "Data", "A preset such as cifar100, or data.", default=..., metavar="DATA"
    ),
    backbone: str = option(
        "Task",
        "Path or Hub id of the backbone.",
        default="google/vit-base-patch32-224-in21k",
        metavar="BACKBONE",
    ),
    out: Path = out_option(
        "The folder to write; run again to continue.", default=Path("reproduce")
    ),
    table: str = option(
        "Task",
        "Which rows: 2, 4, poster, 2b, 4.4 (concatenation without the mask) or rates.",
        default="2",
        autocompletion=among(("2", "4", "poster", "2b", "4.4", "rates")),
    ),
    beside: list[Path] | None = option(
        "Task",
        "For table 4.4: a folder that this command wrote for other data; repeatable.",
        metavar="FOLDER",
    ),
    lr: str = option(
        "Training", "Learning rates, in place of the usual grid.", default="", metavar="A,B"
    ),
    seeds: int = option("Training", "Seeds for every learning rate.", default=1),
    image_size: int | None = shared.IMAGE_SIZE,
    dry_run: bool = switch("Output", "Print what would be trained, and stop.", "--dry-run"),
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Train a table of the paper with its own recipe, and print it next to the paper's figures."""
    from engram.data.datasets import load
    from engram.experiments.reproduce import Reproduction

    recipe, lrs = recipe_from("paper", flags[Recipe]), numbers("--lr", lr, float)
    rows = Reproduction(dataset, table, recipe, lrs, seeds, beside or [])
    if dry_run:
        return rows.plan()
    splits = load(dataset, **ColumnOptions(**flags[ColumnOptions]).columns())
    return rows.run(splits, backbone, out, image_size, progress)
