"""Descriptions for the command line: engrams, bundles, backbones, and a push, pull or list."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engram.backbones.load import load_backbone
from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.store.bundles import Bundle, is_bundle, read_bundle
from engram.store.engram import (
    Engram,
    summarise_preprocessing,
    summarise_regime,
    summarise_settings,
    summarise_shape,
)
from engram.store.format import is_engram, read_engram
from engram.store.record import lineage_rows, score, score_rows, summarise_recipe
from engram.store.remote import CARD, ListedEngram, local_path
from engram.store.sharing import Pulled, Push
from engram.tasks.costs import Costs, backbone_macs, task_costs
from engram.tasks.spec import TaskSpec
from engram.util.description import Description
from engram.util.documents import MAX_BYTES
from engram.util.text import printable, summarise_names
from engram.vit import ViT

_SIZES = {(192, 12): "Ti", (384, 12): "S", (768, 12): "B", (1024, 24): "L", (1280, 32): "H"}
_MOST_CHANGES = 1_000  # that a push prints for people


def describe(source: str | os.PathLike[str]) -> Description:
    """An engram, a bundle or a backbone, by its path or Hub id. Only for a backbone is a ViT
    loaded.
    """
    path = local_path(source)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and path.exists():
        raise EngramError(
            f"{path} is a pickle, not an engram; if it is a legacy checkpoint of "
            "transformers-learnable-memory, convert it with `engram convert`."
        )
    if path.is_dir() and is_bundle(path):
        return describe_bundle(read_bundle(path))
    if path.is_file() and (is_engram(path) or not _may_be_backbone(path)):
        return describe_engram(read_engram(path), path.stat().st_size)
    return describe_backbone(load_backbone(source))


def _may_be_backbone(path: Path) -> bool:
    """Whether a file is an .npz file, or has the complete header of a safetensors file."""
    if path.suffix != ".safetensors":
        return path.suffix == ".npz"
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length < min(path.stat().st_size, MAX_BYTES) and file.read(1) == b"{"


def describe_engram(engram: Engram, size: int | None = None) -> Description:
    """One engram; `size` is that of its file in bytes."""
    spec, backbone = engram.spec, engram.backbone
    costs = _costs(engram)
    document = {
        "what": "engram",
        **engram.header(),
        "content": engram.content,
        "parameters": engram.parameters,
        "costs": _costs_document(costs),
    }
    if spec.kind_object.fitted:
        document["fitted"] = {
            name: engram.tensors[f"head.{name}"].tolist() for name in spec.kind_object.fitted
        }
    rows = [
        ("task", spec.name),
        ("kind", spec.kind),
        (spec.kind_object.nouns[1], summarise_names(spec.classes, nouns=spec.kind_object.nouns)),
        *_computed_values(engram),
        ("regime", f"{summarise_regime(spec)} ({spec.method.about})"),
        *lineage_rows(engram),
        ("parameters", f"{engram.parameters:,}, {costs.head_parameters:,} of them in the head"),
        ("costs", _summarise_costs(costs)),
        (
            "backbone",
            backbone.source + (f", in {backbone.dtype}" if backbone.dtype != "fp32" else ""),
        ),
        ("fingerprint", backbone.fingerprint),
        ("backbone shape", f"{summarise_shape(backbone)}, {backbone.heads} heads"),
        ("preprocessing", summarise_preprocessing(engram.preprocessing)),
        *score_rows(engram),
        ("recipe", summarise_recipe(engram)),
        ("created", " by ".join(part for part in (engram.created, engram.library) if part)),
        ("content", engram.content),
    ]
    if size is not None:
        document["bytes"] = size
        rows.append(("size", f"{size / 1000:,.1f} KB"))
    return Description(document, _printable_rows(rows))


def describe_bundle(bundle: Bundle) -> Description:
    """A bundle, with a table of its engrams."""
    specs = {engram.spec.name: engram.spec for engram in bundle.engrams}
    costs = [_costs(e, _ancestors(e.spec, specs)) for e in bundle.engrams]
    total = sum(c.macs + c.head_macs for c in costs)
    share = _percent(total / costs[0].backbone_macs)
    manifest = bundle.manifest()
    entries = [
        {**entry, **_bundle_entry(engram, cost)}
        for entry, engram, cost in zip(manifest["engrams"], bundle.engrams, costs, strict=True)
    ]
    rows = [
        ("bundle", str(bundle.folder)),
        ("tasks", f"{len(specs):,}"),
        ("costs", f"{_macs(total)} per image, {share} of the backbone"),
        ("backbone", bundle.backbone.source),
        ("fingerprint", bundle.backbone.fingerprint),
        ("backbone shape", f"{summarise_shape(bundle.backbone)}, {bundle.backbone.heads} heads"),
        ("preprocessing", summarise_preprocessing(bundle.preprocessing)),
    ]
    columns = (
        "task", "kind", "classes", "score", "regime", "settings", "extends", "parameters", "costs",
    )  # fmt: skip
    table = tuple(
        (
            engram.spec.name,
            engram.spec.kind,
            f"{len(engram.spec.classes):,}",
            score(engram) or "-",
            engram.spec.regime,
            summarise_settings(engram.spec),
            ", ".join(engram.spec.extends) or "-",
            f"{engram.parameters:,}",
            _percent(cost.share),
        )
        for engram, cost in zip(bundle.engrams, costs, strict=True)
    )
    document = {"what": "bundle", **manifest, "engrams": entries}
    return Description(document, _printable_rows(rows), columns, table)


def _bundle_entry(engram: Engram, costs: Costs) -> dict[str, Any]:
    spec = engram.spec
    return {
        "kind": spec.kind,
        "classes": list(spec.classes),
        "regime": spec.regime,
        **spec.method.settings(),
        "extends": list(spec.extends),
        "parameters": engram.parameters,
        "metrics": engram.header()["metrics"],
        "costs": _costs_document(costs),
    }


def describe_engrams(paths: Sequence[Path]) -> Description:
    """Several engrams, by the paths of their files."""
    engrams = {path: read_engram(path) for path in paths}
    document = {
        "engrams": [
            {"file": str(path), **describe_engram(engram, path.stat().st_size).document}
            for path, engram in engrams.items()
        ]
    }
    table = tuple(
        (
            str(path),
            f"{len(e.spec.classes):,}",
            summarise_settings(e.spec),
            ", ".join(e.spec.extends) or "-",
        )
        for path, e in engrams.items()
    )
    return Description(document, [], ("file", "classes", "settings", "extends"), table)


def describe_backbone(backbone: ViT) -> Description:
    """A backbone, with what a pass through it costs."""
    shape, config = BackboneShape.of(backbone), backbone.config
    preprocessing = backbone.preprocessing
    size = (preprocessing.size if preprocessing else None) or config.image_size
    macs = backbone_macs(shape, size)
    document = {
        "what": "backbone",
        "source": backbone.source,
        "fingerprint": backbone.fingerprint,
        "family": _family(shape),
        "config": asdict(config),
        "parameters": shape.parameters,
        "macs": macs,
        "preprocessing": preprocessing and preprocessing.to_dict(),
        "labels": list(backbone.labels) if backbone.labels else None,
    }
    rows = [
        ("backbone", backbone.source),
        ("family", _family(shape)),
        ("fingerprint", backbone.fingerprint),
        ("shape", f"{summarise_shape(shape)}, {config.heads} heads, {config.activation}"),
        ("parameters", f"{shape.parameters:,} without the head"),
        ("costs", f"{_macs(macs)} per image of {size[0]} x {size[1]}"),
        ("preprocessing", summarise_preprocessing(preprocessing)),
        ("own classes", summarise_names(backbone.class_names) if backbone.class_names else "none"),
    ]
    return Description(document, _printable_rows(rows))


# Sharing


def describe_push(done: Push, dry_run: bool) -> Description:
    """What was sent to the Hub, or would be. A dry run shows the headers and the card as well."""
    at = f"{done.repo} at {done.revision}" if done.revision else done.repo
    facts = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in done.files.items()
    }
    contents = {engram.file_name: engram.content for engram in done.engrams}
    document = {
        "what": "push",
        "dry_run": dry_run,
        "repo": done.repo,
        "revision": done.revision,
        "private": done.private,
        "message": done.message,
        "url": done.url or None,
        "commit": done.commit or None,
        "files": [{"file": n, **fact, "content": contents.get(n)} for n, fact in facts.items()],
        "headers": {engram.file_name: engram.header() for engram in done.engrams},
        "changed": list(done.changed),
        "warnings": list(done.warnings),
        "card": done.card,
    }
    rows = [
        ("would be sent to" if dry_run else "sent to", at),
        *([("url", done.url), ("commit", done.commit)] if done.commit else []),
        ("message", done.message),
        *[("changed", text) for text in done.changed[:_MOST_CHANGES]],
        *[("warning", text) for text in done.warnings],
    ]
    if len(done.changed) > _MOST_CHANGES:
        rows.append(("changed", f"{len(done.changed) - _MOST_CHANGES:,} more; --json lists them"))
    if dry_run:
        rows += [(f"{e.file_name} header", _summarise_header(e)) for e in done.engrams]
        rows.append((CARD, "\n\n" + done.card))
    table = tuple(
        (name, f"{fact['bytes']:,}", str(fact["sha256"]), contents.get(name, ""))
        for name, fact in facts.items()
    )
    return Description(document, rows, ("file", "bytes", "sha256", "content"), table)


def _summarise_header(engram: Engram) -> str:
    """The header without shapes and hashes. The JSON document has all of it."""
    header = engram.header()
    summary = {
        "task": engram.spec.name,
        "classes": summarise_names(engram.spec.classes, 12, engram.spec.kind_object.nouns),
        "backbone": engram.backbone.source,
        **{key: header[key] for key in ("metrics", "recipe", "created", "library")},
    }
    return json.dumps(summary)


def describe_pull(done: Sequence[Pulled]) -> Description:
    """The files that a pull wrote, or that were there already."""
    document = {
        "what": "pull",
        "files": [
            {
                "file": str(one.path),
                "source": one.source,
                "task": one.task or None,
                "content": one.content or None,
                "bytes": one.bytes,
                "new": one.new,
            }
            for one in done
        ],
    }
    table = tuple(
        (
            str(one.path),
            one.task,
            f"{one.bytes:,}",
            one.content[:12],
            one.source,
            "" if one.new else "already there",
        )
        for one in done
    )
    return Description(document, [], ("file", "task", "bytes", "content", "from", ""), table)


def describe_list(source: str, found: Sequence[ListedEngram]) -> Description:
    """The engrams in a Hub repository or a folder."""
    document = {
        "what": "list",
        "source": source,
        "engrams": [
            {
                "source": one.source,
                "task": one.task,
                "kind": one.engram.spec.kind,
                "classes": len(one.engram.spec.classes),
                "regime": one.engram.spec.regime,
                "extends": list(one.engram.spec.extends),
                "backbone": one.engram.backbone.source,
                "fingerprint": one.engram.backbone.fingerprint,
                "metrics": one.engram.header()["metrics"],
                "content": one.content,
                "bytes": one.bytes,
            }
            for one in found
        ],
    }
    table = tuple(
        (
            one.task,
            f"{len(one.engram.spec.classes):,}",
            score(one.engram) or "-",
            one.engram.spec.regime,
            ", ".join(one.engram.spec.extends) or "-",
            printable(one.engram.backbone.source, 60),
            f"{one.bytes:,}",
            one.content[:12],
            one.source,
        )
        for one in found
    )
    columns = (
        "task", "classes", "score", "regime", "extends", "backbone", "bytes", "content", "source",
    )  # fmt: skip
    rows = [] if found else [("engrams", f"none in {source}")]
    return Description(document, rows, columns, table)


# Parts of a description


def _costs(engram: Engram, ancestors: Sequence[TaskSpec] = ()) -> Costs:
    preprocessing = engram.preprocessing
    size = preprocessing.size if preprocessing else None
    return task_costs(engram.backbone, engram.spec, ancestors, size)


def _ancestors(spec: TaskSpec, specs: Mapping[str, TaskSpec]) -> list[TaskSpec]:
    """All tasks that a task reads. In `specs`, parents come before their children."""
    wanted = set(spec.extends)
    for name in reversed(list(specs)):
        if name in wanted:
            wanted.update(specs[name].extends)
    return [specs[name] for name in specs if name in wanted]


def _costs_document(costs: Costs) -> dict[str, Any]:
    return {**asdict(costs), "share": costs.share}


def _summarise_costs(costs: Costs) -> str:
    summary = (
        f"{_macs(costs.macs + costs.head_macs)} per image, {_percent(costs.share)} of the "
        f"backbone's {_macs(costs.backbone_macs)}"
    )
    return summary + (", in a pass of its own" if costs.own_pass else "")


def _macs(count: int) -> str:
    for unit, name in ((10**9, "GMAC"), (10**6, "MMAC")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count / 1000:,.1f} kMAC"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _family(shape: BackboneShape) -> str:
    size = _SIZES.get((shape.width, shape.depth))
    return f"ViT-{size}/{shape.patch}" if size else f"ViT with patches of {shape.patch}"


def _computed_values(engram: Engram) -> list[tuple[str, str]]:
    """What was computed from the data and not trained: thresholds, means; the values of masks."""
    spec = engram.spec
    rows = [
        (name, _first_values(spec.classes, engram.tensors[f"head.{name}"].tolist()))
        for name in spec.kind_object.fitted
    ]
    if spec.kind_object.per_pixel:
        values = _first_values(spec.classes, spec.values)
        rows.append(("masks", f"{values}; ignored: {spec.ignore}"))
    return rows


def _first_values(names: Sequence[str], values: Sequence[float], most: int = 5) -> str:
    pairs = list(zip(names, values, strict=True))
    first = [f"{name} {value:.4g}" for name, value in pairs[:most]]
    return ", ".join(first) + (", …" if len(pairs) > most else "")


def _printable_rows(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows that are safe to print, whatever a file contains, without empty ones."""
    return [(label, printable(text, 600)) for label, text in rows if text]
