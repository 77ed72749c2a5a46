"""What the commands do: find the trunk, the engrams and the data, call, describe the result."""

from __future__ import annotations

import base64
import csv
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engram.data.datasets import Splits, load
from engram.data.sources import images_below
from engram.errors import EngramError, Notice
from engram.inference.evaluate import answers
from engram.inference.load import load_model
from engram.inference.predict import kind_of, predict
from engram.model import MemoryViT
from engram.report.page import TaskPart, answers_for_report, write_report
from engram.store.bundles import is_bundle
from engram.store.format import is_engram
from engram.tasks.kinds import KINDS, Kind
from engram.train import cache
from engram.train.fit import Result, fit
from engram.train.recipe import RECIPES, Recipe
from engram.train.run import run_folder
from engram.train.sweep import SweepResult, sweep
from engram.trunks.load import load_trunk
from engram.util.description import Description
from engram.util.files import check_writable, write_atomically
from engram.util.hub import is_hub_address
from engram.util.processes import Team
from engram.util.progress import Progress


def recipe_from(name: str, flags: Mapping[str, Any]) -> Recipe:
    """The named recipe with the flags that were given."""
    if name not in RECIPES:
        raise EngramError(f"There is no recipe {name!r}; choose one of {', '.join(RECIPES)}.")
    given = {key: value for key, value in flags.items() if value is not None}
    if "epochs" in given:
        given.setdefault("steps", 0)  # else the recipe's own steps would count
    return RECIPES[name].but(**given)


def terms_from(
    kind: str, label: str = "", classes: str = "", ignore: int | None = None
) -> dict[str, Any]:
    """What flags say about data, as arguments of `load`.

    `label` and `classes` have commas between names; a class may be NAME=VALUE, for masks.
    """
    terms: dict[str, Any] = {"kind": kind}
    if label:
        terms["label"] = [name.strip() for name in label.split(",")]
    if ignore is not None:
        terms["ignore"] = ignore
    pairs = [part.rpartition("=") for part in classes.split(",") if part.strip()]
    if pairs:
        terms["classes"] = [(name if equals else rest).strip() for name, equals, rest in pairs]
    if any(equals for _, equals, _ in pairs):
        try:
            terms["values"] = [int(value) for _, _, value in pairs]
        except ValueError:
            raise EngramError(
                f"--classes is {classes!r}; give every class the value that it has in masks, such "
                "as pet=1,background=2, or none of them."
            ) from None
    masks = kind in KINDS and KINDS[kind].per_pixel
    for flag, there in (("--ignore", ignore is not None), ("--classes with =", "values" in terms)):
        if there and kind in KINDS and not masks:
            raise EngramError(f"{flag} is about masks, and {kind} has none; leave it out.")
    return terms


def named(text: str, names: Collection[str] = ()) -> tuple[str, str]:
    """NAME=REST in its two parts; no name where there is none, or the text is a path with a =."""
    name, equals, rest = text.partition("=")
    if not equals or (name not in names and Path(text).exists()):
        return "", text
    return name, rest


def data_for(
    model: MemoryViT, tasks: Sequence[str], text: str, split: str, label: str = ""
) -> tuple[str, Splits]:
    """What `--data NAME=DATA` names, loaded for one of these tasks; DATA alone if there is one."""
    name, spec = named(text, tasks)
    if not name and len(tasks) != 1:
        raise EngramError(
            f"--data {text}: which of the tasks {', '.join(tasks)} is it for? Write "
            f"--data {next(iter(tasks), 'NAME')}={text}."
        )
    task = model.task(name or tasks[0])
    if task.spec.name not in tasks:
        raise EngramError(f"--data {text} is for none of the tasks {', '.join(tasks)}.")
    columns = [column.strip() for column in label.split(",")] if label else None
    splits = load(spec, split=split, like=task.spec, label=columns)
    if splits.unsplit:
        told = (
            f"{spec} has no splits, so all its {len(splits[split]):,} pictures are measured; if "
            f"{task.spec.name!r} learned from them, that is no test."
        )
        warnings.warn(told, Notice, stacklevel=2)
    return task.spec.name, splits


def _start(
    backbone: str, image_size: int | None, extends: Sequence[str]
) -> tuple[MemoryViT, list[str]]:
    """The trunk with the parents attached, and the parents' names."""
    model = MemoryViT(load_trunk(backbone, image_size=image_size))
    names = []
    for text in extends:
        given, path = named(text)
        task = model.attach(path)
        if given and given != task.spec.name:
            raise EngramError(
                f"--extends {text}: the engram in {path} is called {task.spec.name!r}, not "
                f"{given!r}; write --extends {task.spec.name}={path}."
            )
        names.append(task.spec.name)
    return model, names


def fit_job(
    data: str,
    task: str,
    out: Path,
    recipe: Recipe,
    *,
    backbone: str,
    image_size: int | None,
    extends: Sequence[str],
    cells: int,
    seeds: int,
    resume: bool,
    overwrite: bool,
    test: bool,
    progress: Progress,
    terms: Mapping[str, Any],
    **settings: Any,
) -> Description:
    """`engram fit`."""
    team = Team()
    splits = load(data, **terms)
    model, parents = _start(backbone, image_size, extends)
    result: Result | SweepResult
    if seeds != 1:
        result = sweep(
            model, task, splits, recipe,
            cells=[cells], seeds=seeds, out=out, resume=resume, overwrite=overwrite, test=test,
            team=team, progress=progress, extends=parents, **settings,
        )  # fmt: skip
    else:
        settings = {**splits.task, **settings}
        model.add_task(task, cells=cells, extends=parents, seed=recipe.seed, **settings)
        result = fit(
            model, task, splits, recipe,
            out=out, resume=resume, overwrite=overwrite, test=test, team=team, progress=progress,
        )  # fmt: skip
    rows = _result_rows(result, KINDS[splits.kind])
    if splits.ignored:
        rows.append(("ignored", f"{splits.ignored} files that are no images"))
    report = _report_beside(model, result, splits, recipe) if team.main else ""
    return Description({**result.to_dict(), "report": report}, [*rows, ("report", report)])


def sweep_job(
    data: str,
    task: str,
    out: Path,
    recipe: Recipe,
    *,
    backbone: str,
    image_size: int | None,
    extends: Sequence[str],
    lrs: Sequence[float],
    cells: Sequence[int],
    weight_decays: Sequence[float],
    seeds: int,
    resume: bool,
    overwrite: bool,
    refit: bool,
    test: bool,
    progress: Progress,
    terms: Mapping[str, Any],
    **settings: Any,
) -> Description:
    """`engram sweep`."""
    team = Team()
    splits = load(data, **terms)
    model, parents = _start(backbone, image_size, extends)
    result = sweep(
        model, task, splits, recipe,
        lrs=lrs, cells=cells, weight_decays=weight_decays, seeds=seeds, out=out, resume=resume,
        overwrite=overwrite, refit=refit, test=test, team=team, progress=progress,
        extends=parents, **settings,
    )  # fmt: skip
    kind = KINDS[splits.kind]
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
    report = _report_beside(model, result, splits, recipe, refit) if team.main else ""
    rows = [*_result_rows(result, kind), ("report", report)]
    return Description({**result.to_dict(), "report": report}, rows, columns, table)


def _report_beside(
    model: MemoryViT,
    result: Result | SweepResult,
    splits: Splits,
    recipe: Recipe,
    refit: bool = False,
) -> str:
    """Write the page into the run's folder and give its path, or say why there is none.

    It is about the test split if that was evaluated, else about validation, which after a refit
    are pictures that the task has learned.
    """
    assert result.path is not None
    folder = run_folder(result.path)
    split = "test" if "test" in result.metrics else "val"
    dataset = splits.with_validation(recipe.val_share, recipe.data_seed)[split]
    lead = f"Trained in {result.seconds:,.0f} seconds; the engram is {result.path.name}."
    if refit and split == "val":
        dataset, kind = dataset.subset(range(len(dataset)), "train"), KINDS[splits.kind]
        before = kind.shown(result.metrics["val"][kind.score])
        lead += (
            " It was trained once more with the validation images, so what follows is about "
            f"pictures that it has learned; before that, its validation {kind.title} was {before}."
        )
    settings = [] if isinstance(result, Result) else [one.to_dict() for one in result.settings]
    try:
        said = answers_for_report(model, dataset, result.task)
        if len(said.dataset) < len(dataset):
            some, all_of = f"{len(said.dataset):,}", f"{len(dataset):,}"
            lead += f" The page is about {some} of the {all_of} pictures, chosen by chance."
        part = TaskPart(said, _history(folder / "history.csv"), settings)
        page = write_report(
            folder / "report.html",
            model,
            [part],
            title=f"{result.task}: what it learned",
            lead=lead,
        )
    except EngramError as error:  # the engram is written, and that is what was asked for
        return f"not written: {error}"
    return str(page)


def _history(path: Path) -> list[dict[str, float]]:
    """The learning curve that the run logged; none where it logged nothing."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _result_rows(result: Result | SweepResult, kind: Kind) -> list[tuple[str, str]]:
    rows = [
        ("engram", str(result.path)),
        ("regime", result.regime),
        ("parameters", f"{result.parameters:,}"),
        ("seconds", f"{result.seconds:.0f}"),
    ]
    for split, metrics in result.metrics.items():
        said = f"{kind.shown(metrics[kind.score])} of {metrics['images']:,}"
        rows.append((f"{split} {kind.title}", said))
        if metrics.get("deviation"):
            spread = f"{kind.shown(metrics['mean'])} ± {kind.shown(metrics['deviation'])}"
            rows.append(("over seeds", spread))
    if result.unreadable:
        rows.append(("unreadable", f"{len(result.unreadable)} images, listed beside the engram"))
    return rows


def _check_report(path: Path) -> None:
    """That a page can be written there, in the place of nothing but another page."""
    check_writable(path)
    if path.exists():
        with open(path, "rb") as file:
            if not file.read(15).lower().startswith(b"<!doctype html"):
                raise EngramError(f"{path} is there already and is no page; choose another.")


def eval_job(
    sources: Sequence[Path],
    data: Sequence[str],
    *,
    split: str,
    label: str,
    backbone: str | None,
    batch: int,
    workers: int,
    skip_bad: bool,
    report: Path | None,
    progress: Progress,
) -> Description:
    """`engram eval`: every task on its data, all of them attached together."""
    if report is not None:
        _check_report(report)  # before an hour of work, not after it
    team = Team()
    model = load_model(sources, backbone)
    pairs: list[tuple[str, Splits]] = []
    for text in data:
        name, splits = data_for(model, list(model.tasks), text, split, label)
        if name in [known for known, _ in pairs]:
            raise EngramError(
                f"--data {text}: there is data for {name!r} already; evaluate on one after the "
                "other."
            )
        pairs.append((name, splits))
    if not pairs:
        raise EngramError("There is nothing to evaluate on; give --data NAME=DATA.")
    document: dict[str, Any] = {}
    parts = []
    for name, splits in pairs:
        said = answers(
            model, splits, name, split=split, batch=batch, workers=workers, team=team,
            progress=partial(progress, name),
        )  # fmt: skip
        document[name] = said.metrics(skip_bad)
        parts.append(TaskPart(said))
    rows = []
    if report is not None and team.main:
        names = ", ".join(document)
        try:
            write_report(report, model, parts, title=f"{names}: how good on the {split} split")
        except EngramError as error:  # what was measured is told all the same
            rows = [("report", f"not written: {error}")]
    wanted = [key for name in document for key in model.task(name).kind.columns]
    shown = tuple(dict.fromkeys([key for key in wanted if key != "loss"] + ["loss"]))
    table = tuple(
        (
            name,
            f"{metrics['images']:,}",
            *(f"{metrics[key]:.4f}" if key in metrics else "" for key in shown),
            str(len(metrics["unreadable"])),
        )
        for name, metrics in document.items()
    )
    columns = ("task", "images", *shown, "unreadable")
    return Description(document, rows, columns, table)


def predict_job(
    sources: Sequence[Path],
    *,
    backbone: str | None,
    tasks: Sequence[str],
    top_k: int,
    masks: Path | None = None,
) -> Description:
    """`engram predict`: engrams and bundles among the arguments answer about all the others."""
    engrams = [
        path for path in sources
        if is_hub_address(path) or is_bundle(path) or is_engram(path)
        or path.suffix == ".safetensors"
    ]  # fmt: skip
    images = [image for path in sources if path not in engrams for image in _images(path)]
    if not engrams and backbone is None:
        raise EngramError(
            "No engram was given, so nobody can answer; give one (FILE.safetensors or a bundle), "
            "or --backbone to ask the trunk alone."
        )
    if not images:
        raise EngramError("No image was given; add the paths of images, or of a folder of them.")
    model = load_model(engrams, backbone) if engrams else MemoryViT(load_trunk(str(backbone)))
    results = predict(model, images, tasks=tasks or None, top_k=top_k)
    if masks is not None:
        _write_masks(results, masks)
    table = []
    for result in results:
        if "error" in result:
            table.append((result["image"], "", result["error"]))
        for name, answer in result.get("tasks", {}).items():
            table.append((result["image"], name, kind_of(model, name).words(answer)))
    return Description(results, [], ("image", "task", "answer"), tuple(table))


def _write_masks(results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Put every mask that was answered into a file, IMAGE.TASK.png, and its path into its place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngramError(f"The folder {folder} cannot be made ({error.strerror}).") from None
    taken: set[str] = set()
    for result in results:
        stem = Path(result["image"]).stem
        while stem in taken:  # of a picture in another folder
            stem += "_"
        taken.add(stem)
        for name, answer in result.get("tasks", {}).items():
            if "mask" in answer:
                path = folder / f"{stem}.{name}.png"
                write_atomically(path, base64.b64decode(answer["mask"].partition(",")[2]))
                answer["mask"] = str(path)


def _images(path: Path) -> list[str]:
    if not path.is_dir():
        return [os.fspath(path)]
    return images_below(path)[0]


def cache_job(clear: bool) -> Description:
    """`engram cache info` and `engram cache clear`."""
    if clear:
        freed = cache.clear()
        return Description({"freed": freed}, [("freed", f"{freed / 1e9:.2f} GB")])
    entries = cache.info()
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
    document = {"folder": str(cache.default_root()), "caches": entries}
    rows = [("folder", str(cache.default_root())), ("caches", str(len(entries)))]
    return Description(document, rows, ("trunk", "images", "size", "pixels", "view"), table)
