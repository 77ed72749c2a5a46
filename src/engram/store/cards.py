"""The card of engrams on the Hub: a README.md that people find, read and can act on."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from engram import __version__
from engram.store.engram import (
    Engram,
    summarise_preprocessing,
    summarise_regime,
    summarise_shape,
)
from engram.store.remote import LISTED
from engram.util.hub import REPO
from engram.util.text import printable, summarise_names

_PAPER = "https://arxiv.org/abs/2203.15243"
_TAGS = ("engram", "learnable-memory", "memory-tokens", "vision-transformer", "vit", "fine-tuning")
# What the Hub calls a kind of task; it has no word for numbers read off a picture.
_PIPELINES = {
    "classification": "image-classification",
    "multilabel": "image-classification",
    "segmentation": "image-segmentation",
}
_METRICS = {"macro_f1": "f1", "top5": "top-5 accuracy"}  # ours -> the Hub's


def hub_id(source: str) -> str | None:
    """The Hub repository that a trunk's source names, without its revision; None for others."""
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
    """The card of these engrams in a repository. `files`: of each name, its size and SHA-256."""
    parts = [
        _about(engrams),
        _learned(engrams),
        _trunk(engrams[0]),
        *(_data(engram) for engram in engrams),
        *(_measured(engram) for engram in engrams),
        *(_trained(engram) for engram in engrams),
        _attach(repo, engrams, bundle),
        _files(engrams, files),
        f"_Written by `engram push`, engram-vit {__version__}._",
    ]
    title = ", ".join(engram.spec.name for engram in engrams)
    body = "\n\n".join(part for part in (f"# {_cell(title)}", *parts) if part)
    return f"---\n{_front(repo, engrams, license)}\n---\n\n{body}\n"


def _front(repo: str, engrams: Sequence[Engram], license: str | None) -> str:
    trunk = engrams[0].trunk
    base = hub_id(trunk.source)
    kinds = list(dict.fromkeys(engram.spec.kind for engram in engrams))
    pipelines = list(dict.fromkeys(_PIPELINES[kind] for kind in kinds if kind in _PIPELINES))
    measured = [result for engram in engrams for result in _results(engram)]
    datasets = [data.removeprefix("hf:") for data in map(_data_name, engrams) if data[:3] == "hf:"]
    more: dict[str, Any] = {"base_model_relation": "adapter"} if base else {}
    more[LISTED] = [
        {"task": e.spec.name, "file": file_of(e), "content": e.content} for e in engrams
    ]
    data = ModelCardData(
        library_name="engram",
        license=license,
        tags=[*_TAGS, *kinds, f"engram-trunk-{trunk.fingerprint[:12]}", *pipelines[1:]],
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


def file_of(engram: Engram) -> str:
    return f"{engram.spec.name}.safetensors"


def _data_name(engram: Engram) -> str:
    return str(engram.recipe.get("data") or "")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Metrics by split, the numbers among them; those of no split are under ''."""
    flat = {k: v for k, v in metrics.items() if _is_number(v)}
    splits: dict[str, dict[str, float]] = {"": flat} if flat else {}
    for split, values in metrics.items():
        if isinstance(values, Mapping):
            numbers = {str(k): v for k, v in values.items() if _is_number(v)}
            if numbers:
                splits[str(split)] = numbers
    return splits


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _results(engram: Engram) -> list[EvalResult]:
    """What the Hub shows beside a card: shares of the best split that was measured."""
    splits = _numbers(engram.metrics)
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
        if isinstance(value, float) and name not in ("loss", "mean", "deviation")
    ]


# In words


def _cell(text: object) -> str:
    """Safe inside a table or a line of Markdown."""
    return re.sub(r"([|<>`\\*_\[\]#])", r"\\\1", printable(str(text), 400))


def _brief(value: float) -> str:
    """Four digits of it, unless it is a whole number that no float can hold."""
    return f"{value:.4g}" if abs(value) <= sys.float_info.max else _cell(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _about(engrams: Sequence[Engram]) -> str:
    what = "An engram" if len(engrams) == 1 else f"{len(engrams)} engrams"
    parts = engrams[0].spec.parts
    if parts.masked:
        how = "a frozen Vision Transformer was taught through a few memory cells a layer, a class "
        how += "token and a head"
        then = "The ViT itself is not in here and is not changed by it: other engrams for the "
        then += "same ViT answer beside it in the same pass."
    else:
        how = f"a Vision Transformer was taught by training {parts.about}"
        then = "Its own copy of the ViT is in the file." if parts.trunk else "The ViT is not in it."
        then += " It takes a pass of its own." if parts.changes_trunk else ""
    return (
        f"{what}: what {how} ([Fine-tuning Image Transformers using Learnable Memory]({_PAPER})). "
        f"{then}"
    )


def _learned(engrams: Sequence[Engram]) -> str:
    rows = [
        (
            _cell(e.spec.name),
            e.spec.kind,
            _cell(summarise_names(e.spec.classes, 12, e.spec.does.nouns)),
            _cell(summarise_regime(e.spec)),
            f"{e.parameters:,}",
        )
        for e in engrams
    ]
    names = {engram.spec.name for engram in engrams}
    absent = [
        f"`{e.spec.name}` extends `{parent}` (content `{content[:12]}`), which is not in this "
        "repository and has to be attached first."
        for e in engrams
        for parent, content in e.parents.items()
        if parent not in names
    ]
    table = _table(("task", "kind", "classes", "regime", "parameters"), rows)
    return "\n\n".join(["## What it learned", table, *absent])


def _trunk(engram: Engram) -> str:
    trunk, base = engram.trunk, hub_id(engram.trunk.source)
    named = f"[{base}](https://huggingface.co/{base})" if base else _cell(trunk.source)
    return "\n".join(
        [
            "## Its trunk",
            "",
            f"- ViT: {named}, {summarise_shape(trunk)}, {trunk.heads} heads",
            f"- fingerprint: `{trunk.fingerprint}`",
            f"- pictures: {summarise_preprocessing(engram.preprocessing)}",
            "",
            "It attaches to the ViT with this fingerprint, whichever file that was read from, and "
            "to no other.",
        ]
    )


def _data(engram: Engram) -> str:
    said = []
    if _data_name(engram):
        said.append(_cell(_data_name(engram)))
    if _is_number(engram.recipe.get("train_images")):
        said.append(f"{engram.recipe['train_images']:,} training images")
    return f"## Data of {_cell(engram.spec.name)}\n\n{', '.join(said)}" if said else ""


def _measured(engram: Engram) -> str:
    splits = _numbers(engram.metrics)
    if not splits:
        return ""
    names = list(dict.fromkeys(name for values in splits.values() for name in values))
    rows = [
        (split or "-", *(_brief(values[n]) if n in values else "" for n in names))
        for split, values in splits.items()
    ]
    columns = ("split", *map(_cell, names))
    return f"## Metrics of {_cell(engram.spec.name)}\n\n{_table(columns, rows)}"


def _trained(engram: Engram) -> str:
    facts = {
        key: value
        for key, value in engram.recipe.items()
        if not isinstance(value, (list, dict)) and key not in ("data", "train_images")
    }
    if not facts:
        return ""
    words = ", ".join(f"{_cell(key)} {_cell(value)}" for key, value in facts.items())
    return f"## Recipe of {_cell(engram.spec.name)}\n\n{words}"


def _attach(repo: str, engrams: Sequence[Engram], bundle: bool) -> str:
    source = engrams[0].trunk.source
    findable = hub_id(source) is not None or source == "pico"
    where = "" if findable else ', backbone="path/to/that/vit"'
    lines = ["import engram", ""]
    if bundle:
        lines.append(
            f'model = engram.load_model("hf:{repo}"{where})  # the ViT, and all of it attached'
        )
    else:
        lines.append(f'model = engram.load_model(["its-parents.safetensors", "hf:{repo}"]{where})')
    lines += ['answers = engram.predict(model, ["picture.jpg"])', ""]
    lines.append("# or beside what is attached already; what follows # pins the content")
    lines += [f'model.attach("hf:{repo}/{file_of(e)}#{e.content[:12]}")' for e in engrams]
    code = "\n".join(lines)
    flag = "" if findable else " --backbone path/to/that/vit"
    parents = "" if bundle else "its-parents.safetensors "
    return (
        f"## Attach it\n\n```python\n{code}\n```\n\nAt the command line:\n\n"
        f"```console\n$ engram predict {parents}hf:{repo} picture.jpg{flag}\n```"
    )


def _files(engrams: Sequence[Engram], files: Mapping[str, tuple[int, str]]) -> str:
    contents = {file_of(engram): f"`{engram.content}`" for engram in engrams}
    rows = [
        (f"`{name}`", f"{size:,}", f"`{sha}`", contents.get(name, ""))
        for name, (size, sha) in files.items()
    ]
    said = (
        "`content` is a hash over the tensors and all that decides what a task answers. It is in "
        "the file, and checked whenever the file is read."
    )
    return f"## Files\n\n{_table(('file', 'bytes', 'SHA-256', 'content'), rows)}\n\n{said}"
