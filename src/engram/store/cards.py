"""The card of a Hub repository of engrams: README.md with metadata for the Hub and text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from engram import __version__
from engram.store.describe import summarise_preprocessing, summarise_shape
from engram.store.engram import Engram, summarise_regime
from engram.store.record import lineage_rows, metric_rows, numbers_by_split, summarise_recipe
from engram.store.remote import LISTED
from engram.util.hub import REPO
from engram.util.text import printable, summarise_names

_PAPER = "[Fine-tuning Image Transformers using Learnable Memory](https://arxiv.org/abs/2203.15243)"
_TAGS = ("engram", "learnable-memory", "memory-tokens", "vision-transformer", "vit", "fine-tuning")
# The Hub's name of each kind of task. It has none for regression from images, and for anomalies.
_PIPELINES = {
    "classification": "image-classification",
    "multilabel": "image-classification",
    "segmentation": "image-segmentation",
}
_NO_RESULTS = ("loss", "mean", "deviation", "temperature", "threshold", "uncalibrated_ece")
_METRICS = {"macro_f1": "f1", "top5": "top-5 accuracy"}  # our name -> the Hub's


def hub_id(source: str) -> str | None:
    """The Hub repository that a backbone's source names, without revision; None for a path."""
    repo = source.partition("@")[0]
    return repo if REPO.fullmatch(repo) else None


def write_card(
    repo: str,
    engrams: Sequence[Engram],
    files: Mapping[str, bytes],
    *,
    bundle: bool,
    license: str | None,
) -> str:
    """The text of README.md, by the template card.md.j2; `files` are all others in `repo`."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _cell
    template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    backbone, base = engrams[0].backbone, hub_id(engrams[0].backbone.source)
    text = environment.from_string(template).render(
        repo=repo,
        engrams=engrams,
        names=[engram.spec.name for engram in engrams],
        files=files,
        contents={engram.file_name: f"`{engram.content}`" for engram in engrams},
        bundle=bundle,
        backbone=backbone,
        base=base,
        where="" if base or backbone.source == "pico" else ', backbone="path/to/that/vit"',
        front_matter=_front_matter(repo, engrams, license),
        about=_about(engrams),
        facts=lambda e: [*lineage_rows(e), *metric_rows(e), ("recipe", summarise_recipe(e))],
        shape=summarise_shape(backbone, backbone.heads),
        preprocessing=summarise_preprocessing(engrams[0].preprocessing),
        classes=lambda spec: summarise_names(spec.classes, 12, spec.kind_object.nouns),
        regime=summarise_regime,
        sha256=lambda data: hashlib.sha256(data).hexdigest(),
        version=__version__,
    )
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


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


def _cell(text: object, most: int = 400) -> str:
    """Text that is safe in a table or a line of Markdown."""
    return re.sub(r"([|<>`\\*_\[\]#])", r"\\\1", printable(str(text), most))


def _about(engrams: Sequence[Engram]) -> str:
    count, method = len(engrams), engrams[0].spec.method
    what = "An engram holds" if count == 1 else f"These {count} engrams hold"
    what += " what a frozen Vision Transformer (ViT) learned for "
    what += f"one task: {method.about}" if count == 1 else "one task each"
    if method.shares_pass:
        then = "The ViT is not in the file and does not change, so other engrams for the same ViT "
        then += "can run in the same pass."
    else:
        own = method.backbone_parameters(engrams[0].backbone)
        then = "Its own copy of the ViT is in the file." if own else "The ViT is not in it."
        then += " It needs a pass of its own."
    return f"{what} ({_PAPER}). {then}"
