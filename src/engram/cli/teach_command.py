"""`engram teach`: a task from a handful of images, which can learn more and forget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from engram.cli.application import (
    DataArgument,
    Json,
    OutEngram,
    Overwrite,
    OwnBackbone,
    Threads,
    app,
)
from engram.cli.bars import bars
from engram.cli.complete import among
from engram.cli.flags import DATA, TASK, flags_from, option
from engram.cli.terminal import announce, show
from engram.cli.training_commands import taught
from engram.errors import EngramError
from engram.train.options import ColumnOptions
from engram.util.settings import Given

if TYPE_CHECKING:
    from engram.data.datasets import Splits
    from engram.model import MemoryViT
    from engram.util.progress import Progress


@app.command(name="teach")
@flags_from({ColumnOptions: DATA})
def teach_command(
    data: DataArgument,
    out: OutEngram,
    task: Annotated[
        str | None, option(TASK, "Name of the task (default: that of --from).", "--task")
    ] = None,
    old: Annotated[
        str | None,
        option(TASK, "A taught engram that learns these images, too.", "--from", metavar="FILE"),
    ] = None,
    forget: Annotated[
        bool, option(TASK, "Let the task in --from forget these images.", "--forget")
    ] = False,
    statistics: Annotated[
        str,
        option(
            TASK,
            "Keep statistics of the images' features, for familiarity, and to learn more, forget "
            "and merge later (on, off).",
            autocompletion=among(("on", "off")),
        ),
    ] = "on",
    backbone: OwnBackbone = "auto",
    overwrite: Overwrite = False,
    threads: Threads = None,
    as_json: Json = False,
    *,
    flags: Given,
) -> None:
    """Teach a task from one to five images a class, in a second; or teach it more images."""
    if forget and old is None:
        raise EngramError(
            "--forget needs the engram that forgets these images: --from OLD.safetensors."
        )
    if task is None and old is None:
        raise EngramError("The task needs a name; give --task NAME.")
    with bars(as_json) as progress:
        progress("starting", 0, 0)
        from engram.data.datasets import load
        from engram.store.format import check_free
        from engram.train import teach as teaching

        check_free(out, overwrite)  # before a download
        progress("reading the data", 0, 0)
        splits = load(
            data, one_class=old is not None, **ColumnOptions(**flags[ColumnOptions]).columns()
        )
        model, name = _model(backbone, splits, old, task, progress)
        if forget:
            result = teaching.forget(
                model, name, splits, out=out, overwrite=overwrite, progress=progress
            )
        else:
            result = teaching.teach(
                model, name, splits, statistics=statistics, out=out, overwrite=overwrite,
                progress=progress,
            )  # fmt: skip
    show(taught(result, model), as_json)


def _model(
    backbone: str, splits: Splits, old: str | None, task: str | None, progress: Progress
) -> tuple[MemoryViT, str]:
    """A model to teach, with the old task attached if there is one, and the name of the task."""
    from engram.model import MemoryViT
    from engram.store.fitting import load_engram_backbone
    from engram.store.format import read_engram
    from engram.store.remote import single_engram_path
    from engram.train.backbone import backbone_for

    progress("loading the backbone", 0, 0)
    if old is None:
        assert task is not None
        found, _ = backbone_for(backbone, splits, announce=announce, progress=progress)
        return MemoryViT(found), task
    engram = read_engram(single_engram_path(old))
    engram = engram if task is None else engram.renamed(task)
    model = MemoryViT(load_engram_backbone(engram, None if backbone == "auto" else backbone))
    model.attach(engram)
    return model, engram.spec.name
