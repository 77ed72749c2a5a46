"""`engram fit --words` and `engram embed --text`: a text tower makes classes and vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.cli.terminal import Watch, announce
from engram.errors import EngramError
from engram.train.options import DataOptions, RunOptions
from engram.util.settings import Given
from engram.util.text import Description, counted

if TYPE_CHECKING:
    from engram.train.job import TrainingJob
    from engram.train.runs.result import Result

_TEXT_TOWER = (
    "a backbone with a text tower: give a CLIP, a SigLIP or a SigLIP 2 with --backbone, such as "
    "openai/clip-vit-base-patch32."
)


def refuse_beside(flag: str, why: str, given: Mapping[str, Any]) -> None:
    """Refuse what was given beside a flag that decides it."""
    useless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if useless:
        raise EngramError(
            f"{', '.join(useless)} cannot be given with {flag}: {why}, and takes seconds. Leave it "
            "out."
        )


def fit_without_images(
    words: str, task: str, out: Path, given: Given, progress: Watch
) -> Description:
    """Write a task that is made of words alone."""
    from engram.backbones.load import load_backbone
    from engram.model import MemoryViT
    from engram.store.describe import describe_engram
    from engram.train.runs.run import check_out
    from engram.train.words import add_words, parse_words

    options, parsed = RunOptions(**given[RunOptions]), parse_words(words)
    check_out(out, overwrite=options.overwrite, resume=False)
    if options.backbone == "auto":
        raise EngramError(f"--words needs {_TEXT_TOWER}")
    progress("loading the backbone", 0, 0)
    size, dtype = options.image_size, options.backbone_dtype
    model = MemoryViT(load_backbone(options.backbone, image_size=size, dtype=dtype))
    progress("embedding the words", 0, 0)
    add_words(model, task, parsed, kind=DataOptions(**given[DataOptions]).kind)
    model.save(task, out, recipe={"words": parsed})
    return describe_engram(model.engram(task), out.stat().st_size)


def fit_with_images(
    words: str, data: str, task: str, out: Path, given: Given, progress: Watch
) -> tuple[TrainingJob, Result]:
    """Teach a task that begins with words, from images."""
    from engram.store.format import read_engram, write_engram
    from engram.train.fit import fit
    from engram.train.job import TrainingJob
    from engram.train.opening import opening
    from engram.train.words import add_words, parse_words, words_of

    parsed = parse_words(words)
    job = TrainingJob.start(data, out, given, progress, announce)
    parsed = {label: list(texts) for label, texts in words_of(job.splits.classes, parsed).items()}
    progress("embedding the words", 0, 0)
    made = add_words(job.model, task, parsed, kind=job.splits.kind)
    progress.say(opening(job.model, [made.spec], job.splits, job.recipe))
    result = fit(job.model, task, job.splits, job.recipe, **job.arguments(out, progress))
    if job.processes.main:
        engram = read_engram(out)
        write_engram(out, replace(engram, recipe={**engram.recipe, "words": parsed}))
    return job, result


def embed_texts(texts: Sequence[str], backbone: str | None, out: Path) -> Description:
    """Write the vectors of texts, under the name `text`, in the space of a task of words."""
    from engram.backbones.text_tower import TextTower
    from engram.inference.embed import Embeddings, vector_file

    if backbone is None:
        raise EngramError(f"--text needs {_TEXT_TOWER}")
    vectors = TextTower(backbone).embed(texts).numpy()
    none = ("",) * len(texts)
    with vector_file(out) as add:
        add(Embeddings(tuple(texts), none, none, {"text": vectors}))
    width = vectors.shape[1]
    document = {"path": str(out), "backbone": backbone, "texts": list(texts), "width": width}
    rows = [
        ("backbone", backbone),
        ("texts", counted(len(texts), "text")),
        ("numbers", f"{width:,}"),
        ("file", str(out)),
    ]
    return Description(document, rows)
