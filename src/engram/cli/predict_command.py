"""`engram predict`: answers about a few images on the terminal, or about any number in a file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.cli import shared
from engram.cli.arguments import model_of
from engram.cli.flags import argument, option, out_option
from engram.cli.terminal import Watch
from engram.cluster.connect import ClusterSettings
from engram.errors import EngramError
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.util.settings import Given
from engram.util.text import Description

if TYPE_CHECKING:
    from engram.inference.bulk.predict_to import BulkResult
    from engram.model import MemoryViT


@shared.command(
    "predict",
    {BulkSettings: "With --out", ClusterSettings: "With --on"},
    work="loading the tasks",
    threads=True,
)
def predict_command(
    sources: list[str] = argument(
        "FILE… IMAGE…",
        "Engrams or bundles, and images or folders; with --out also tables, lists, "
        "archives and addresses.",
    ),
    backbone: str | None = shared.BACKBONE,
    tasks: list[str] | None = shared.TASKS,
    top_k: int = option("Output", "Number of classes to return per task.", default=3),
    masks: Path | None = option(
        "Output", "Write masks and heat maps into this folder, as PNG.", metavar="FOLDER"
    ),
    out: Path | None = out_option(
        "Write answers to a .parquet, .jsonl or .csv file, or to a folder of parquet "
        "files, as they come. If interrupted, the same command continues."
    ),
    overwrite: bool = shared.OVERWRITE,
    on: str | None = option(
        "Resources",
        "Run on Ray, with --out: ray starts Ray on this machine, HOST:PORT or "
        "ray://HOST:PORT connects to a cluster.",
        metavar="CLUSTER",
    ),
    device: str = shared.DEVICE,
    precision: str = shared.PRECISION,
    backbone_dtype: str = shared.BACKBONE_DTYPE,
    engine: str = shared.ENGINE,
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Ask every task about images, in one pass."""
    given, cluster = flags[BulkSettings], flags[ClusterSettings]
    settings = BulkSettings(
        **{"decoders": 1, **given} if on else given,  # an actor takes as many CPUs
        top_k=top_k, device=device, precision=precision, engine=engine,
    )  # fmt: skip
    if on is None:
        _refuse(cluster, "--on, the Ray cluster to answer on, such as --on ray")
    if out is None:
        bulk = {"on": on, **given, "overwrite": overwrite}
        _refuse(bulk, "--out, the file or folder for answers")
    elif on is not None:
        from engram.cluster.connect import check_address

        check_address(on)  # a wrong one is refused before the model is loaded
    from engram.data.folders import image_paths
    from engram.export.runtime import make_engine
    from engram.inference.bulk.answering import Answering, Questions, answered_here
    from engram.inference.bulk.predict_to import predict_to
    from engram.inference.predict import answered_names, predict

    model, others = _model_and_sources(sources, backbone, backbone_dtype)
    if out is None:
        results = predict(
            model, image_paths(others),
            tasks=tasks or None, top_k=top_k, device=device, precision=precision,
            engine=make_engine(model, settings), progress=progress,
        )  # fmt: skip
        if masks is not None:
            _write_masks(model, results, masks)
        return _table(model, results)
    if not others:
        raise EngramError(
            "No image was given; add a folder, a table, an archive, a list of paths, or - for "
            "paths on standard input."
        )
    answering: Answering = answered_here
    if on is not None:
        from engram.cluster.bulk import answered_on

        answering = answered_on(on, others, ClusterSettings(**cluster), progress)
    questions = Questions(model, answered_names(model, tasks or None), settings, masks, make_engine)
    written = predict_to(
        questions, others, out, overwrite=overwrite, answering=answering, progress=progress
    )
    return _description(written)


def _refuse(given: Mapping[str, object], needed: str) -> None:
    """Refuse options that only mean something together with another one."""
    for flag, wanted in given.items():
        if wanted:
            raise EngramError(f"--{flag.replace('_', '-')} needs {needed}.")


def _table(model: MemoryViT, results: Sequence[Mapping[str, Any]]) -> Description:
    """A row for each image and task; familiarity has a column if there is any."""
    from engram.export.standalone import LEGEND

    known = any("familiarity" in result for result in results)
    table: list[tuple[str, ...]] = []
    for result in results:
        if "error" in result:
            table.append((result["image"], "", result["error"], *([""] if known else [])))
        for name, answer in result.get("tasks", {}).items():
            value = result.get("familiarity", {}).get(name)
            shown = [("" if value is None else f"{value:.2f}")] if known else []
            table.append((result["image"], name, model.task(name).kind.words(answer), *shown))
    columns = ["image", "task", "answer", *(["familiarity"] if known else [])]
    legend = [LEGEND] if known else []
    few = [name for name in model.tasks if _too_few(model, name)]
    if few:
        legend.append(f"no familiarity of {', '.join(few)}: too few images were learned from")
    code = 2 if any("error" in result for result in results) else 0
    return Description(results, [], columns, table, legend, code=code)


def _too_few(model: MemoryViT, name: str) -> bool:
    """Whether a training was to keep statistics of its images, and they were too few for it."""
    task = model.task(name)
    asked = task.sums is not None or model.engram(name).recipe.get("statistics") == "on"
    return asked and task.statistics is None and not task.kind.one_class


def _description(result: BulkResult) -> Description:
    document = {
        "out": str(result.path),
        "images": result.images,
        "errors": result.errors,
        "resumed": result.resumed,
        "seconds": result.seconds,
        "images_per_second": result.rate,
    }
    rows = [("answers", str(result.path)), ("images", f"{result.images:,}")]
    if result.resumed:
        rows.append(("there already", f"{result.resumed:,}"))
    if result.errors:
        rows.append(("unreadable", f"{result.errors:,}; the column error says why"))
    rows.append(("speed", f"{result.rate:,.1f} images a second"))
    return Description(document, rows)


def _model_and_sources(
    sources: Sequence[str], backbone: str | None, backbone_dtype: str
) -> tuple[MemoryViT, list[str]]:
    """Engrams and bundles among the arguments make the model; all the others are images."""
    from engram.store.bundles import is_bundle
    from engram.store.format import is_engram
    from engram.util.hub import is_hub_address

    engrams = [
        path for path in sources
        if is_hub_address(path) or is_bundle(path) or is_engram(Path(path))
        or path.endswith(".safetensors")
    ]  # fmt: skip
    model = model_of(
        engrams, backbone, backbone_dtype,
        "No engram was given, so there is nothing to answer; give one (FILE.safetensors or a "
        "bundle), or --backbone to ask the backbone alone.",
    )  # fmt: skip
    return model, [path for path in sources if path not in engrams]


def _write_masks(model: MemoryViT, results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write every mask and heat map as IMAGE.TASK.png, and put its path in its place."""
    from engram.util.files import make_folder, write_atomically

    make_folder(folder)
    taken: set[str] = set()
    for result in results:
        stem = Path(result["image"]).stem
        while stem in taken:  # an image of the same name in another folder
            stem += "_"
        taken.add(stem)
        for name, answer in result.get("tasks", {}).items():
            if picture := model.task(name).kind.picture:
                path = folder / f"{stem}.{name}.png"
                write_atomically(path, base64.b64decode(answer[picture].partition(",")[2]))
                answer[picture] = str(path)
