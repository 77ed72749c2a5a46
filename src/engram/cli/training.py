"""`engram fit`, `engram sweep` and `engram cache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.app import DataArgument, Json, app
from engram.cli.complete import among
from engram.cli.flags import DATA, OUTPUT, TASK, TRAINING, Given, flags_of, numbers, words
from engram.cli.options import DataOptions, RunOptions, named, recipe_from
from engram.cli.progress import bars
from engram.cli.recipe_files import names_file, with_recipe_file
from engram.cli.terminal import announce, show
from engram.errors import EngramError
from engram.tasks.regimes import REGIMES
from engram.tasks.settings import TaskSettings
from engram.train.recipe import Recipe
from engram.util.description import Description
from engram.util.text import counted

if TYPE_CHECKING:
    from engram.data.datasets import Splits
    from engram.model import MemoryViT
    from engram.train.auto import AutoResult
    from engram.train.callbacks import Callback
    from engram.train.result import Result
    from engram.train.sweep import SweepResult
    from engram.util.processes import Team
    from engram.util.progress import Progress

Out = Annotated[
    Path, typer.Option("-o", "--out", help="The engram to write.", rich_help_panel=OUTPUT)
]
TaskName = Annotated[str, typer.Option("--task", help="Name of the task.", rich_help_panel=TASK)]
_REGIME_HELP = (
    "Which parameters train, and whether attention is masked; auto tries those that leave the "
    f"trunk alone (auto, {', '.join(REGIMES)}; default: auto, or masked "
    "with --recipe paper or --seeds)."
)
_PANELS = {DataOptions: DATA, TaskSettings: TASK, Recipe: TRAINING, RunOptions: TRAINING}


@app.command(name="fit")
@flags_of(_PANELS)
def fit_command(
    data: DataArgument,
    task: TaskName,
    out: Out,
    regime: Annotated[
        str | None,
        typer.Option(
            help=_REGIME_HELP, autocompletion=among(("auto", *REGIMES)), rich_help_panel=TASK
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Train this many seeds and keep the best (default: 1).", rich_help_panel=TRAINING
        ),
    ] = None,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Train a task on images and write it as an engram."""
    from engram.report.run import write_run_report
    from engram.train.auto import AutoResult

    with bars(as_json) as progress:
        given, own = with_recipe_file(flags or {}, regime=regime, seeds=seeds)
        job = _Job.start(data, out, given, progress)
        seeds = 1 if own["seeds"] is None else own["seeds"]
        one = job.options.recipe == "paper" or seeds != 1
        chosen = own["regime"] or ("masked" if one else "auto")
        result: AutoResult | Result | SweepResult
        if chosen == "auto" and seeds != 1:
            raise EngramError("--seeds needs one regime; give one, such as --regime side.")
        progress.say(job.opening(task, chosen))
        if chosen == "auto":
            result = job.auto(task, out, progress)
        elif seeds == 1:
            result = job.of(chosen).fit(task, out, progress)
        else:
            job = job.of(chosen)
            result = job.sweep(task, out, progress, cells=[job.settings.cells], seeds=seeds)
        progress("writing the report", 0, 0)
        report = write_run_report(job.model, result, job.splits, job.recipe) if job.main else ""
    kind = job.model.task(task).kind
    rows = _result_rows(result, job.model)
    if job.splits.ignored:
        rows.append(("ignored", job.splits.ignored_words))
    document = {**result.to_dict(), "trunk": job.model.trunk.source, "report": report}
    columns, table = result.table(kind) if isinstance(result, AutoResult) else ((), ())
    show(Description(document, [*rows, ("report", report)], columns, table), as_json)


@app.command(name="sweep")
@flags_of(_PANELS)
def sweep_command(
    data: DataArgument,
    task: TaskName,
    out: Out,
    cells: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Numbers of memory cells (default: 5).", rich_help_panel=TASK
        ),
    ] = None,
    lr: Annotated[
        str | None,
        typer.Option("--lr", metavar="A,B", help="Learning rates.", rich_help_panel=TRAINING),
    ] = None,
    weight_decay: Annotated[
        str | None, typer.Option(metavar="A,B", help="Weight decays.", rich_help_panel=TRAINING)
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Seeds for every combination (default: 1).", rich_help_panel=TRAINING),
    ] = None,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help="Train the best again, validation images included.",
            rich_help_panel=TRAINING,
        ),
    ] = False,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Train many variants of a task at once and keep the best on validation."""
    from engram.report.run import write_run_report

    given, own = with_recipe_file(
        flags or {}, lr=lr, cells=cells, weight_decay=weight_decay, seeds=seeds, refit=refit or None
    )
    lrs = numbers("--lr", own["lr"], float)
    decays = numbers("--weight-decay", own["weight_decay"], float)
    counts = [5] if own["cells"] is None else numbers("--cells", own["cells"], int)
    seeds, refit = 1 if own["seeds"] is None else own["seeds"], bool(own["refit"])
    with bars(as_json) as progress:
        job = _Job.start(data, out, given, progress)
        progress.say(job.opening(task, job.settings.regime))
        result = job.sweep(
            task, out, progress,
            lrs=lrs, cells=counts, weight_decays=decays, seeds=seeds, refit=refit,
        )  # fmt: skip
        report = ""
        progress("writing the report", 0, 0)
        if job.main:
            report = write_run_report(job.model, result, job.splits, job.recipe, refit)
    show(_sweep_description(result, job.model, report), as_json)


@dataclass(frozen=True)
class _Job:
    """What `fit` and `sweep` train: data, a trunk with the parents attached, and the settings."""

    splits: Splits
    model: MemoryViT
    settings: TaskSettings
    options: RunOptions
    recipe: Recipe
    callbacks: Sequence[Callback]
    team: Team
    why_trunk: str  # a sentence: why it is this trunk

    @classmethod
    def start(cls, data: str, out: Path, given: Given, progress: Progress) -> _Job:
        progress("starting", 0, 0)
        from engram.model import MemoryViT
        from engram.train.recipe_file import RecipeFile
        from engram.train.run import check_out
        from engram.train.trackers import trackers_named
        from engram.train.trunk import trunk_for
        from engram.util.processes import Team

        settings, options = TaskSettings(**given[TaskSettings]), RunOptions(**given[RunOptions])
        name = "default" if names_file(options.recipe) else options.recipe
        recipe = recipe_from(name, given[Recipe])
        reading = DataOptions(**given[DataOptions])
        more = {**asdict(reading), "image_size": options.image_size}
        more |= {
            "class_init": settings.class_init,
            "extends": list(map(_portable, settings.extends)),
        }
        callbacks = [*trackers_named(words(options.log)), RecipeFile(more)]
        check_out(out, overwrite=options.overwrite, resume=options.resume)  # before a download
        progress("reading the data", 0, 0)
        team, splits = Team(options.device), reading.load(data)
        progress("loading the trunk", 0, 0)
        trunk, why = trunk_for(
            options.backbone, splits, image_size=options.image_size,
            parents=[named(text)[1] for text in settings.extends],
            resumed=out if options.resume else None,
            announce=announce if team.main else lambda sentence: None, progress=progress,
        )  # fmt: skip
        model = MemoryViT(trunk)
        settings = settings.with_parents([_attach(model, text) for text in settings.extends])
        return cls(splits, model, settings, options, recipe, callbacks, team, why)

    def opening(self, task: str, regime: str) -> list[tuple[str, str]]:
        """What will be done, for people; `auto` tries several regimes."""
        from engram.train.auto import trained_regimes
        from engram.train.opening import opening

        regimes = [regime]
        if regime == "auto":
            regimes = trained_regimes(self.model, self.splits, self.settings.extends)
        specs = [self.splits.task_spec(task, self.of(one).settings) for one in regimes]
        why = self.why_trunk if self.options.backbone == "auto" else ""
        return opening(self.model, specs, self.splits, self.recipe, why)

    def of(self, regime: str) -> _Job:
        """The same with a task of this regime."""
        return replace(self, settings=replace(self.settings, regime=regime))

    def auto(self, task: str, out: Path, progress: Progress) -> AutoResult:
        from engram.train.auto import auto

        settings, options = self.settings, self.options
        self.splits.task_spec(task, settings)  # refuses what auto would not use, such as --update
        return auto(
            self.model, task, self.splits, self.recipe,
            cells=settings.cells, extends=settings.extends, rank=settings.rank,
            adapter_width=settings.adapter_width, class_init=settings.class_init,
            out=out, resume=options.resume, overwrite=options.overwrite, test=options.test,
            team=self.team, progress=progress, callbacks=self.callbacks,
        )  # fmt: skip

    @property
    def main(self) -> bool:
        """Whether this process writes what all of them share."""
        return self.team.main

    def fit(self, task: str, out: Path, progress: Progress) -> Result:
        from engram.train.fit import fit

        spec, options = self.splits.task_spec(task, self.settings), self.options
        self.model.add(spec, class_init=self.settings.class_init, seed=self.recipe.seed)
        return fit(
            self.model, task, self.splits, self.recipe,
            out=out, resume=options.resume, overwrite=options.overwrite, test=options.test,
            team=self.team, progress=progress, callbacks=self.callbacks,
        )  # fmt: skip

    def sweep(
        self,
        task: str,
        out: Path,
        progress: Progress,
        *,
        cells: Sequence[int],
        seeds: int,
        lrs: Sequence[float] = (),
        weight_decays: Sequence[float] = (),
        refit: bool = False,
    ) -> SweepResult:
        from engram.train.sweep import sweep

        settings, options = self.settings, self.options
        return sweep(
            self.model, task, self.splits, self.recipe,
            lrs=lrs, cells=cells, weight_decays=weight_decays, seeds=seeds, refit=refit,
            regime=settings.regime, extends=settings.extends, update=settings.update,
            adapter_width=settings.adapter_width, class_init=settings.class_init,
            rank=settings.rank,
            out=out, resume=options.resume, overwrite=options.overwrite, test=options.test,
            team=self.team, progress=progress, callbacks=self.callbacks,
        )  # fmt: skip


def _portable(text: str) -> str:
    """An engram of --extends as it can be given from any folder."""
    given, path = named(text)
    path = str(Path(path).resolve()) if Path(path).exists() else path
    return f"{given}={path}" if given else path


def _attach(model: MemoryViT, text: str) -> str:
    """Attach an engram of --extends (T=FILE, or FILE alone), and return its name."""
    given, path = named(text)
    task = model.attach(path)
    if given and given != task.spec.name:
        raise EngramError(
            f"--extends {text}: the engram in {path} is called {task.spec.name!r}, not "
            f"{given!r}; write --extends {task.spec.name}={path}."
        )
    return task.spec.name


def _result_rows(
    result: AutoResult | Result | SweepResult, model: MemoryViT
) -> list[tuple[str, str]]:
    from engram.train.run import unreadable_list

    kind = model.task(result.task).kind
    rows = [
        ("engram", str(result.path)),
        ("trunk", model.trunk.source),
        ("regime", result.regime),
        ("parameters", f"{result.parameters:,}"),
        ("seconds", f"{result.seconds:.0f}"),
    ]
    if result.ending is not None:
        rows.append(("training", str(result.ending)))
    for split, metrics in result.metrics.items():
        score = f"{kind.shown(metrics[kind.score])} of {metrics['images']:,}"
        rows.append((f"{split} {kind.title}", score))
        even = metrics.get("balanced_accuracy", metrics[kind.score])
        if abs(even - metrics[kind.score]) >= 0.01:  # classes of unequal size
            rows.append(
                (f"{split} balanced accuracy", f"{kind.shown(even)}, the mean over classes")
            )
        if metrics.get("deviation"):
            spread = f"{kind.shown(metrics['mean'])} ± {kind.shown(metrics['deviation'])}"
            rows.append(("over seeds", spread))
    if result.unreadable and result.path is not None:
        listed = unreadable_list(result.path)
        rows.append(("unreadable", f"{counted(len(result.unreadable), 'image')}, see {listed}"))
    return rows


def _sweep_description(result: SweepResult, model: MemoryViT, report: str) -> Description:
    kind = model.task(result.task).kind
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
    score = kind.title_of(result.best.measure)
    columns = ("lr", "cells", "weight decay", f"validation {score}", "")
    rows = [*_result_rows(result, model), ("report", report)]
    document = {**result.to_dict(), "trunk": model.trunk.source, "report": report}
    return Description(document, rows, columns, table)


# The cache

cache_app = typer.Typer(
    help="The cache of the trunk's tokens, which masked tasks train from.", no_args_is_help=True
)
app.add_typer(cache_app, name="cache")


@cache_app.command(name="info")
def cache_info(as_json: Json = False) -> None:
    """Print where the cache is and what it holds."""
    from engram.train.caches import default_root, info

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
    from engram.train.caches import clear

    freed = clear()
    show(Description({"freed": freed}, [("freed", f"{freed / 1e9:.2f} GB")]), as_json)
