"""The card of a Hub repository of engrams: README.md with metadata for the Hub and text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from engram import __version__
from engram.store.engram import (
    Engram,
    summarise_preprocessing,
    summarise_regime,
    summarise_shape,
)
from engram.store.record import (
    grown_from,
    is_number,
    merged_from,
    numbers_by_split,
)
from engram.store.remote import LISTED
from engram.util.hub import REPO
from engram.util.text import printable, summarise_names

_PAPER = "https://arxiv.org/abs/2203.15243"
_TAGS = ("engram", "learnable-memory", "memory-tokens", "vision-transformer", "vit", "fine-tuning")
# The Hub's name of each kind of task. It has none for regression from images.
_PIPELINES = {
    "classification": "image-classification",
    "multilabel": "image-classification",
    "segmentation": "image-segmentation",
}
_MOST = 100  # settings on a card
_NO_RESULTS = ("loss", "mean", "deviation", "temperature", "uncalibrated_ece")
_METRICS = {"macro_f1": "f1", "top5": "top-5 accuracy"}  # our name -> the Hub's


def hub_id(source: str) -> str | None:
    """The Hub repository that a backbone's source names, without revision; None for a path."""
    repo = source.partition("@")[0]
    return repo if REPO.fullmatch(repo) else None


def card_of(
    repo: str,
    engrams: Sequence[Engram],
    files: Mapping[str, tuple[int, str]],
    *,
    bundle: bool,
    license: str | None = None,
) -> str:
    """The text of README.md.

    Args:
        repo: The repository, owner/name.
        engrams: The engrams in it.
        files: The size and the SHA-256 of each file.
        bundle: Whether the engrams are a bundle.
        license: The licence, as the Hub names it.
    """
    parts = [
        _about(engrams),
        _tasks(engrams),
        _backbone(engrams[0]),
        *(_data(engram) for engram in engrams),
        *(_metrics(engram) for engram in engrams),
        *(_recipe(engram) for engram in engrams),
        _usage(repo, engrams, bundle),
        _files(engrams, files),
        f"_Written by `engram push`, engram-vit {__version__}._",
    ]
    title = ", ".join(engram.spec.name for engram in engrams)
    body = "\n\n".join(part for part in (f"# {_cell(title)}", *parts) if part)
    return f"---\n{_front_matter(repo, engrams, license)}\n---\n\n{body}\n"


def _front_matter(repo: str, engrams: Sequence[Engram], license: str | None) -> str:
    """The metadata that the Hub indexes, as YAML."""
    backbone = engrams[0].backbone
    base = hub_id(backbone.source)
    kinds = list(dict.fromkeys(engram.spec.kind for engram in engrams))
    pipelines = list(dict.fromkeys(_PIPELINES[kind] for kind in kinds if kind in _PIPELINES))
    measured = [result for engram in engrams for result in _results(engram)]
    datasets = [data.removeprefix("hf:") for data in map(_data_name, engrams) if data[:3] == "hf:"]
    more: dict[str, Any] = {"base_model_relation": "adapter"} if base else {}
    more[LISTED] = [
        {"task": e.spec.name, "file": e.file_name, "content": e.content} for e in engrams
    ]
    data = ModelCardData(
        library_name="engram",
        license=license,
        tags=[*_TAGS, *kinds, f"engram-backbone-{backbone.fingerprint[:12]}", *pipelines[1:]],
        base_model=base,
        datasets=[name for name in datasets if REPO.fullmatch(name)] or None,
        pipeline_tag=pipelines[0] if pipelines else None,
        metrics=list(dict.fromkeys(result.metric_type for result in measured)) or None,
        model_name=repo.partition("/")[2],
        eval_results=measured or None,
        **more,
    )
    text: str = data.to_yaml(line_break="\n")
    return text.rstrip("\n")


def _data_name(engram: Engram) -> str:
    return str(engram.recipe.get("data") or "")


def _results(engram: Engram) -> list[EvalResult]:
    """The results that the Hub shows next to a card: of the test split, or else of validation."""
    splits = numbers_by_split(engram.metrics)
    split = next((name for name in ("test", "val", "") if name in splits), None)
    if split is None:
        return []
    data = _data_name(engram).removeprefix("hf:") or engram.spec.name
    return [
        EvalResult(
            task_type=_PIPELINES.get(engram.spec.kind, engram.spec.kind),
            dataset_type=re.sub(r"[^\w./-]+", "-", data) or "unknown",
            dataset_name=data,
            dataset_split={"val": "validation", "": None}.get(split, split),
            metric_type=_METRICS.get(name, name),
            metric_value=round(value, 6),
        )
        for name, value in splits[split].items()
        if isinstance(value, float) and name not in _NO_RESULTS
    ]


# The sections of the text


def _cell(text: object) -> str:
    """Text that is safe in a table or a line of Markdown."""
    return re.sub(r"([|<>`\\*_\[\]#])", r"\\\1", printable(str(text), 400))


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


_SHARED = (
    "The ViT is not in the file and does not change, so other engrams for the same ViT can run in "
    "the same pass."
)


def _about(engrams: Sequence[Engram]) -> str:
    count, method = len(engrams), engrams[0].spec.method
    paper = f"[Fine-tuning Image Transformers using Learnable Memory]({_PAPER})"
    what = "An engram holds" if count == 1 else f"These {count} engrams hold"
    what += " what a frozen Vision Transformer (ViT) learned for "
    what += f"one task: {method.about}" if count == 1 else "one task each"
    if method.shares_pass:
        return f"{what} ({paper}). {_SHARED}"
    own = method.backbone_parameters(engrams[0].backbone)
    then = "Its own copy of the ViT is in the file." if own else "The ViT is not in it."
    return f"{what} ({paper}). {then} It needs a pass of its own."


def _tasks(engrams: Sequence[Engram]) -> str:
    rows = [
        (
            _cell(e.spec.name),
            e.spec.kind,
            _cell(summarise_names(e.spec.classes, 12, e.spec.kind_object.nouns)),
            _cell(summarise_regime(e.spec)),
            f"{e.parameters:,}",
        )
        for e in engrams
    ]
    names = {engram.spec.name for engram in engrams}
    absent = [
        f"`{e.spec.name}` extends `{parent}` (content `{content[:12]}`), which is not in this "
        "repository and must be attached first."
        for e in engrams
        for parent, content in e.parents.items()
        if parent not in names
    ]
    table = _table(("task", "kind", "classes", "regime", "parameters"), rows)
    return "\n\n".join(["## Tasks", table, *absent, *filter(None, map(_lineage, engrams))])


def _lineage(engram: Engram) -> str:
    """Of which engrams it is the average, and of which it has the classes, if there are such."""
    sources = [
        f"{_cell(name)} (content {_cell(content[:12])}, weight {weight:.4g})"
        for name, content, weight in merged_from(engram)
    ]
    grown = [
        f"`{engram.spec.name}` has the {count:,.0f} classes of {_cell(name)} (content "
        f"{_cell(content[:12])}), and others that were added."
        for name, content, count in grown_from(engram)[-1:]
    ]
    about = f"`{engram.spec.name}` is the average of {len(sources)} engrams: "
    return "\n\n".join([*([f"{about}{', '.join(sources)}."] if sources else []), *grown])


def _backbone(engram: Engram) -> str:
    backbone, base = engram.backbone, hub_id(engram.backbone.source)
    named = f"[{base}](https://huggingface.co/{base})" if base else _cell(backbone.source)
    return "\n".join(
        [
            "## Backbone",
            "",
            f"- ViT: {named}, {summarise_shape(backbone)}, {backbone.heads} heads",
            f"- fingerprint: `{backbone.fingerprint}`",
            f"- preprocessing: {summarise_preprocessing(engram.preprocessing)}",
            "",
            "Engrams attach only to the ViT with this fingerprint, whichever file it was loaded "
            "from.",
        ]
    )


def _data(engram: Engram) -> str:
    facts = []
    if _data_name(engram):
        facts.append(_cell(_data_name(engram)))
    if is_number(engram.recipe.get("train_images")):
        facts.append(f"{engram.recipe['train_images']:,} training images")
    return f"## Data of {_cell(engram.spec.name)}\n\n{', '.join(facts)}" if facts else ""


def _metrics(engram: Engram) -> str:
    splits = numbers_by_split(engram.metrics)
    if not splits:
        return ""
    names = list(dict.fromkeys(name for values in splits.values() for name in values))
    rows = [
        (split or "-", *(f"{values[n]:.4g}" if n in values else "" for n in names))
        for split, values in splits.items()
    ]
    columns = ("split", *map(_cell, names))
    return f"## Metrics of {_cell(engram.spec.name)}\n\n{_table(columns, rows)}"


def _recipe(engram: Engram) -> str:
    facts = {
        key: value
        for key, value in engram.recipe.items()
        if not isinstance(value, (list, dict)) and key not in ("data", "train_images")
    }
    if not facts:
        return ""
    settings = ", ".join(f"{_cell(k)} {_cell(v)}" for k, v in islice(facts.items(), _MOST))
    return f"## Recipe of {_cell(engram.spec.name)}\n\n{settings}"


def _usage(repo: str, engrams: Sequence[Engram], bundle: bool) -> str:
    source = engrams[0].backbone.source
    findable = hub_id(source) is not None or source == "pico"
    where = "" if findable else ', backbone="path/to/that/vit"'
    lines = ["import engram", ""]
    if bundle:
        lines.append(
            f'model = engram.load_model("hf:{repo}"{where})  # the ViT with all tasks attached'
        )
    else:
        lines.append(f'model = engram.load_model(["its-parents.safetensors", "hf:{repo}"]{where})')
    lines += ['answers = engram.predict(model, ["image.jpg"])', ""]
    lines.append("# or add to a model that you have; the digits after # pin the content")
    lines += [f'model.attach("hf:{repo}/{e.file_name}#{e.content[:12]}")' for e in engrams]
    code = "\n".join(lines)
    flag = "" if findable else " --backbone path/to/that/vit"
    parents = "" if bundle else "its-parents.safetensors "
    return (
        f"## How to use\n\n```python\n{code}\n```\n\nOn the command line:\n\n"
        f"```console\n$ engram predict {parents}hf:{repo} image.jpg{flag}\n```"
    )


def _files(engrams: Sequence[Engram], files: Mapping[str, tuple[int, str]]) -> str:
    contents = {engram.file_name: f"`{engram.content}`" for engram in engrams}
    rows = [
        (f"`{name}`", f"{size:,}", f"`{sha}`", contents.get(name, ""))
        for name, (size, sha) in files.items()
    ]
    note = (
        "`content` is a hash over the tensors and everything else that determines the outputs of a "
        "task. It is stored in the file and checked whenever the file is read."
    )
    return f"## Files\n\n{_table(('file', 'bytes', 'SHA-256', 'content'), rows)}\n\n{note}"
