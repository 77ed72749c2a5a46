"""The commands: parse, call, print. No logic.

A command imports what it needs when it runs, so that `engram --help` answers at once; it calls
one function and hands the result to `show`. Whatever goes wrong is told by `main`.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from engram import __version__
from engram.cli.flags import flags_of, numbers
from engram.cli.terminal import bars, complain, notice_or_warning, show, steps
from engram.errors import LOST_WORKER, EngramError, Interrupted, is_lost_worker
from engram.serve.settings import Settings
from engram.train.recipe import RECIPES, Recipe

app = typer.Typer(
    name="engram",
    help="Teach one frozen Vision Transformer any number of new tasks, each one small file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]
Backbone = Annotated[
    str | None,
    typer.Option(metavar="TRUNK", help="Where the trunk lies today: a path or Hub id."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"engram {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|BUNDLE|TRUNK", help="An engram, a bundle, or a trunk's path or Hub id."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print what an engram, a bundle or a trunk is."""
    from engram.store.describe import describe

    show(describe(source), as_json)


@app.command()
def compose(
    sources: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Engrams, or bundles of them.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    backbone: Backbone = None,
    as_json: Json = False,
) -> None:
    """Put engrams for one trunk into one folder, after checking that they fit together."""
    from engram.store.bundles import compose
    from engram.store.describe import describe_bundle

    show(describe_bundle(compose(sources, out, backbone=backbone)), as_json)


@app.command()
def convert(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="OLD.pt", help="The old checkpoint, or hf:OWNER/NAME/OLD.pt."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write engrams into.")],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="TRUNK",
            help="The ViT it was made from: a path or Hub id. Known for the published ones.",
        ),
    ] = None,
    names: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names for its tasks, in order.")
    ] = None,
    raw_pixels: Annotated[
        bool | None,
        typer.Option(
            "--raw-pixels/--normalised-pixels",
            help="It was trained on pixels from 0 to 1 as they are. [the published ones: yes]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make engrams from a checkpoint of necrashter/transformers-learnable-memory."""
    from engram.store.describe import describe_engrams
    from engram.store.legacy import convert

    called = names.split(",") if names else None
    paths = convert(checkpoint, base, out, names=called, raw_pixels=raw_pixels)
    show(describe_engrams(paths), as_json)


@app.command(name="push")
def push_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILE|BUNDLE", help="An engram, a bundle, or engrams that fit."),
    ],
    to: Annotated[str, typer.Option(metavar="OWNER/NAME", help="The Hub repository.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show exactly what would go, and send nothing.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="A branch; made if it is new.")] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private, if it is new.")
    ] = False,
    license: Annotated[str | None, typer.Option(help="For the card, such as apache-2.0.")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="The Hub id under which others find the trunk."),
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete other engrams of the repository.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Send engrams to the Hub with a card that tells what they are."""
    from engram.store.describe import describe_push
    from engram.store.sharing import push

    done = push(
        sources, to, dry_run=dry_run, revision=revision, private=private or None, license=license,
        backbone=backbone, message=message, replace=replace,
    )  # fmt: skip
    show(describe_push(done, dry_run), as_json)


@app.command(name="pull")
def pull_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="hf:OWNER/NAME[/FILE]", help="Repositories or engrams of the Hub."),
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The folder to put them.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace other files of the same names.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fetch engrams from the Hub, verify them, and put them into a folder."""
    from engram.store.describe import describe_pull
    from engram.store.sharing import pull

    show(describe_pull(pull(sources, out, revision=revision, overwrite=overwrite)), as_json)


@app.command(name="list")
def list_command(
    source: Annotated[
        str, typer.Argument(metavar="hf:OWNER/NAME|FOLDER", help="Where to look for engrams.")
    ],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    as_json: Json = False,
) -> None:
    """List the engrams in a Hub repository or a folder."""
    from engram.store.describe import describe_list
    from engram.store.remote import list_engrams

    show(describe_list(source, list_engrams(source, revision=revision)), as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of the scenes and the first weights.")] = 0,
    as_json: Json = False,
) -> None:
    """See it: three tasks learned on one small ViT, composed, and put to the proof."""
    from rich.console import Console

    from engram.experiments.demo_folder import run_demo

    console = Console(quiet=as_json, emoji=False)
    results = run_demo(out, seed=seed, console=console, bars=partial(bars, as_json))
    if as_json:
        print(json.dumps(results, indent=2), flush=True)


# Training


Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help="A folder, a table, .npz, hf:NAME, digits or a preset."),
]
Out = Annotated[Path, typer.Option("-o", "--out", help="The engram to write.")]
TaskName = Annotated[str, typer.Option("--task", help="What to call the task.")]
Trunk = Annotated[
    str, typer.Option("--backbone", metavar="TRUNK", help="The trunk: a path, a Hub id, or pico.")
]
ImageSize = Annotated[
    int | None, typer.Option("--image-size", help="Pixels, if not the trunk's own size.")
]
Extends = Annotated[
    list[str] | None,
    typer.Option("--extends", metavar="T=FILE", help="An engram that the task reads; repeatable."),
]
KindName = Annotated[
    str,
    typer.Option("--kind", help="classification, multilabel, regression or segmentation."),
]
Label = Annotated[
    str, typer.Option("--label", metavar="A,B", help="The column of labels in a table, or several.")
]
Classes = Annotated[
    str,
    typer.Option(
        "--classes", metavar="A,B", help="The classes' names; of masks, with values: pet=1,sky=2."
    ),
]
Ignore = Annotated[
    int | None, typer.Option("--ignore", help="The value of ignored pixels in masks [255].")
]
RegimeName = Annotated[str, typer.Option("--regime", help="What trains and how it attends.")]
Update = Annotated[str, typer.Option("--update", help="Of memory: fresh, propagate or add.")]
Width = Annotated[int, typer.Option("--adapter-width", help="Of the adapters' bottleneck.")]
ClassInit = Annotated[
    str, typer.Option("--class-init", help="First class token: trunk (a copy) or random.")
]
RecipeName = Annotated[
    str, typer.Option("--recipe", help="The settings to start from: default, paper.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the engram if it is there.")]
Test = Annotated[bool, typer.Option("--test", help="Evaluate the test split once, at the end.")]


@app.command(name="fit")
@flags_of(Recipe)
def fit_command(
    data: Data,
    task: TaskName,
    out: Out,
    backbone: Trunk = "pico",
    regime: RegimeName = "masked",
    cells: Annotated[int, typer.Option(help="Memory cells at every layer.")] = 5,
    extends: Extends = None,
    kind: KindName = "classification",
    label: Label = "",
    classes: Classes = "",
    ignore: Ignore = None,
    update: Update = "fresh",
    adapter_width: Width = 32,
    class_init: ClassInit = "trunk",
    image_size: ImageSize = None,
    seeds: Annotated[int, typer.Option(help="Train this many seeds and keep the best.")] = 1,
    recipe: RecipeName = "default",
    resume: Resume = False,
    overwrite: Overwrite = False,
    test: Test = False,
    as_json: Json = False,
    flags: dict[str, Any] | None = None,
) -> None:
    """Learn a task from images and write it as an engram."""
    from engram.cli.jobs import fit_job, recipe_from, terms_from

    with bars(as_json) as progress:
        result = fit_job(
            data, task, out, recipe_from(recipe, flags or {}),
            backbone=backbone, image_size=image_size, extends=extends or (), cells=cells,
            seeds=seeds, resume=resume, overwrite=overwrite, test=test, progress=progress,
            terms=terms_from(kind, label, classes, ignore),
            regime=regime, update=update, adapter_width=adapter_width, class_init=class_init,
        )  # fmt: skip
    show(result, as_json)


@app.command(name="sweep")
@flags_of(Recipe)
def sweep_command(
    data: Data,
    task: TaskName,
    out: Out,
    backbone: Trunk = "pico",
    lr: Annotated[str, typer.Option("--lr", metavar="A,B", help="Learning rates.")] = "",
    cells: Annotated[str, typer.Option(metavar="A,B", help="Counts of memory cells.")] = "5",
    weight_decay: Annotated[str, typer.Option(metavar="A,B", help="Weight decays.")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds for every combination.")] = 1,
    regime: RegimeName = "masked",
    extends: Extends = None,
    kind: KindName = "classification",
    label: Label = "",
    classes: Classes = "",
    ignore: Ignore = None,
    update: Update = "fresh",
    adapter_width: Width = 32,
    class_init: ClassInit = "trunk",
    image_size: ImageSize = None,
    recipe: RecipeName = "default",
    resume: Resume = False,
    overwrite: Overwrite = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Train the best again, validation images included.")
    ] = False,
    test: Test = False,
    as_json: Json = False,
    flags: dict[str, Any] | None = None,
) -> None:
    """Learn a task in many variants at once and keep the best on validation."""
    from engram.cli.jobs import recipe_from, sweep_job, terms_from

    with bars(as_json) as progress:
        result = sweep_job(
            data, task, out, recipe_from(recipe, flags or {}),
            backbone=backbone, image_size=image_size, extends=extends or (),
            lrs=numbers("--lr", lr, float), cells=numbers("--cells", cells, int),
            weight_decays=numbers("--weight-decay", weight_decay, float), seeds=seeds,
            resume=resume, overwrite=overwrite, refit=refit, test=test, progress=progress,
            terms=terms_from(kind, label, classes, ignore),
            regime=regime, update=update, adapter_width=adapter_width, class_init=class_init,
        )  # fmt: skip
    show(result, as_json)


@app.command(name="reproduce")
@flags_of(Recipe, RECIPES["paper"])
def reproduce_command(
    dataset: Annotated[
        str, typer.Option("--dataset", metavar="DATA", help="A preset such as cifar100, or data.")
    ],
    backbone: Annotated[
        str, typer.Option("--backbone", metavar="TRUNK", help="The trunk: a path or a Hub id.")
    ] = "google/vit-base-patch32-224-in21k",
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The folder to write; run again to go on.")
    ] = Path("reproduce"),
    table: Annotated[str, typer.Option(help="Which rows: 2, 4, poster or 2b.")] = "2",
    lr: Annotated[
        str, typer.Option("--lr", metavar="A,B", help="Learning rates, instead of the usual grid.")
    ] = "",
    seeds: Annotated[int, typer.Option(help="Seeds for every learning rate.")] = 1,
    image_size: ImageSize = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained, and stop.")
    ] = False,
    as_json: Json = False,
    flags: dict[str, Any] | None = None,
) -> None:
    """Train a table of the paper with its own recipe, and print it beside the paper's figures."""
    from engram.cli.jobs import recipe_from
    from engram.experiments.reproduce import plan, reproduce

    recipe, lrs = recipe_from("paper", flags or {}), numbers("--lr", lr, float)
    if dry_run:
        show(plan(dataset, table, recipe, lrs, seeds), as_json)
        return
    with bars(as_json) as progress:
        result = reproduce(
            dataset, backbone, out, table=table, recipe=recipe, lrs=lrs, seeds=seeds,
            image_size=image_size, progress=progress,
        )  # fmt: skip
    show(result, as_json)


@app.command(name="eval")
def eval_command(
    sources: Annotated[list[Path], typer.Argument(metavar="FILE", help="Engrams or bundles.")],
    data: Annotated[
        list[str], typer.Option("--data", metavar="NAME=DATA", help="A task and its data.")
    ],
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    label: Label = "",
    backbone: Backbone = None,
    batch: Annotated[int, typer.Option(help="Images at once.")] = 64,
    workers: Annotated[int, typer.Option(help="Processes that decode images.")] = 2,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave unreadable images out of the count.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page about it, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure tasks on data, all of them attached together."""
    from engram.cli.jobs import eval_job

    with bars(as_json) as progress:
        result = eval_job(
            sources, data, split=split, label=label, backbone=backbone, batch=batch,
            workers=workers, skip_bad=skip_bad, report=report, progress=progress,
        )  # fmt: skip
    show(result, as_json)


@app.command(name="predict")
def predict_command(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FILE… IMAGE…", help="Engrams or bundles, and images or folders."),
    ],
    backbone: Backbone = None,
    tasks: Annotated[list[str] | None, typer.Option("--task", help="Only these tasks.")] = None,
    top_k: Annotated[int, typer.Option(help="How many classes of each answer.")] = 3,
    masks: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the masks of segmentations there, as PNG."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask every task about images, in one pass."""
    from engram.cli.jobs import predict_job

    result = predict_job(sources, backbone=backbone, tasks=tasks or (), top_k=top_k, masks=masks)
    show(result, as_json)
    if any("error" in image for image in result.document):
        raise typer.Exit(2)


@app.command(name="bench")
def bench_command(
    backbone: Annotated[
        str | None,
        typer.Option(metavar="TRUNK", help="The trunk: a path, a Hub id, or pico. [pico]"),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="ViT-B/32", help="Or only its shape, with random weights."),
    ] = None,
    tasks: Annotated[str, typer.Option(metavar="A,B", help="Counts of tasks.")] = "1,10,100",
    batch: Annotated[str, typer.Option(metavar="A,B", help="Images at once.")] = "1,16",
    cells: Annotated[int, typer.Option(help="Memory cells at every layer.")] = 5,
    seconds: Annotated[float, typer.Option(help="For each table; more gives less noise.")] = 5.0,
    threads: Annotated[int | None, typer.Option(help="Of torch, if not its own choice.")] = None,
    as_json: Json = False,
) -> None:
    """Measure tasks beside the plain trunk and beside other ways to do the same."""
    from engram.experiments.bench import bench

    counts, batches = numbers("--tasks", tasks, int), numbers("--batch", batch, int)
    with steps(as_json) as say:
        result = bench(
            backbone, shape=shape, tasks=counts, batches=batches, cells=cells, seconds=seconds,
            threads=threads, say=say,
        )  # fmt: skip
    show(result, as_json)


@app.command(name="export")
def export_command(
    sources: Annotated[
        list[Path], typer.Argument(metavar="BUNDLE", help="A bundle, or engrams for one trunk.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file: .onnx, or .pt2.")],
    kind: Annotated[
        str | None, typer.Option("--format", help="onnx or torch, if the ending is not to say.")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Whole numbers in the large products: fast, inexact.")
    ] = False,
    tasks: Annotated[list[str] | None, typer.Option("--task", help="Only these tasks.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="NAME=DATA", help="Measure a task before and after."),
    ] = None,
    split: Annotated[str, typer.Option(help="Of the data: train, val or test.")] = "test",
    label: Label = "",
    backbone: Backbone = None,
    batch: Annotated[int, typer.Option(help="Images at once, when measuring.")] = 32,
    workers: Annotated[int, typer.Option(help="Processes that decode images.")] = 2,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it is there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write all tasks as one file that runs without engram, checked against the model."""
    from engram.cli.export import export_job

    with bars(as_json) as progress:
        result = export_job(
            sources, out, kind=kind, int8=int8, tasks=tasks or (), data=data or (), split=split,
            label=label, backbone=backbone, batch=batch, workers=workers, overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    show(result, as_json)


@app.command(name="serve")
@flags_of(Settings)
def serve_command(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder of engrams.")],
    backbone: Backbone = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ENGRAM_TOKEN",
            help="Who sends it may attach and delete tasks.",
            show_envvar=True,
        ),
    ] = None,
    as_json: Json = False,
    flags: dict[str, Any] | None = None,
) -> None:
    """Answer over HTTP, with a page to try it; tasks can come and go meanwhile."""
    from engram.serve.run import Service

    settings = Settings(**{k: v for k, v in (flags or {}).items() if v is not None})
    service = Service(bundle, settings, token=token, backbone=backbone)
    show(service.description, as_json)
    service.run()


cache_app = typer.Typer(help="What the trunk fed to tasks, kept on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


@cache_app.command(name="info")
def cache_info(as_json: Json = False) -> None:
    """Print where the cache lies and what it holds."""
    from engram.cli.jobs import cache_job

    show(cache_job(clear=False), as_json)


@cache_app.command(name="clear")
def cache_clear(as_json: Json = False) -> None:
    """Remove everything from the cache."""
    from engram.cli.jobs import cache_job

    show(cache_job(clear=True), as_json)


@cache
def _commands() -> Callable[..., Any]:
    """What typer makes of `app`, once a process: many a command takes less time than making it."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code: 0, 2 after a user's mistake, 1 after ours.

    A mistake is one sentence on stderr; with `--json`, stdout holds {"error": the sentence}.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter is no error
            stream.reconfigure(errors="replace")
    warnings.formatwarning = notice_or_warning
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidies up, as Ctrl-C does
    try:
        _commands()(args=given, prog_name="engram")
    except SystemExit as stop:  # how typer ends, after help and usage errors too
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == 130:
            print("Stopped.", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 130
    except EngramError as error:
        complain(str(error), "--json" in given)
        return 2
    except OSError as error:  # of the machine: a full disk, a folder that may not be read
        what = f"{error.filename} cannot be used" if error.filename else "The output was lost"
        complain(f"{what} ({error.strerror or error}).", "--json" in given)
        return 2
    except Exception as error:
        if os.environ.get("ENGRAM_DEBUG"):
            raise
        if is_lost_worker(error):
            complain(LOST_WORKER, "--json" in given)
            return 2
        complain(
            f"Something went wrong inside engram ({type(error).__name__}: {error}); please report "
            "it with the command you ran. ENGRAM_DEBUG=1 shows where.",
            "--json" in given,
        )
        return 1
    return 0
