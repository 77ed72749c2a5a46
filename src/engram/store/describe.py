"""Descriptions for the command line: engrams, bundles, backbones, and a push, pull or list."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.backbones.load import load_backbone
from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.store.bundles import Bundle, is_bundle, read_bundle, read_version
from engram.store.engram import Engram, summarise_regime
from engram.store.format import is_engram, read_engram
from engram.store.record import Rows, lineage_rows, metric_cell, metric_rows, summarise_recipe
from engram.store.remote import CARD, ListedEngram, local_path
from engram.tasks.costs import Costs, backbone_macs, task_costs
from engram.tasks.spec import TaskSpec
from engram.util.documents import MAX_BYTES
from engram.util.text import Description, printable, summarise_names
from engram.vit import ViT

if TYPE_CHECKING:
    from engram.store.sharing import Pulled, Push

_SIZES = {(192, 12): "Ti", (384, 12): "S", (768, 12): "B", (1024, 24): "L", (1280, 32): "H"}
_MOST_CHANGES = 1_000  # that a push prints for people


def describe(source: str | os.PathLike[str]) -> Description:
    """Describe an engram, a bundle or a backbone (which is loaded), by its path or Hub id."""
    path = local_path(source)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and path.exists():
        raise EngramError(
            f"{path} is a pickle, not an engram; if it is a legacy checkpoint of "
            "transformers-learnable-memory, convert it with `engram convert`."
        )
    if is_bundle(path):
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
    """Describe one engram; `size` is that of its file in bytes."""
    spec, kind = engram.spec, engram.spec.kind_object
    costs = _costs(engram)
    fitted = {name: engram.tensors[f"head.{name}"].tolist() for name in kind.fitted}
    document = {
        "what": "engram",
        **engram.header(),
        "content": engram.content,
        "parameters": engram.parameters,
        "costs": {**asdict(costs), "share": costs.share},
        **({"fitted": fitted} if fitted else {}),
    }
    rows = [
        ("task", spec.name),
        ("kind", spec.kind),
        (kind.nouns[1], summarise_names(spec.classes, nouns=kind.nouns)),
        *((name, _first_values(spec.classes, values)) for name, values in fitted.items()),
        ("regime", f"{summarise_regime(spec)} ({spec.method.about})"),
        *lineage_rows(engram),
        ("parameters", f"{engram.parameters:,}, {costs.head_parameters:,} of them in the head"),
        (
            "costs",
            f"{_macs(costs.macs + costs.head_macs)} per image, {_percent(costs.share)} of the "
            f"backbone's {_macs(costs.backbone_macs)}"
            + (", in a pass of its own" if costs.own_pass else ""),
        ),
        *_backbone_rows(engram),
        *metric_rows(engram),
        ("recipe", summarise_recipe(engram)),
        ("created", " by ".join(part for part in (engram.created, engram.library) if part)),
        ("content", engram.content),
    ]
    if kind.per_pixel:
        values = _first_values(spec.classes, spec.values)
        rows.insert(3 + len(fitted), ("masks", f"{values}; ignored: {spec.ignore}"))
    if engram.has_sums:
        images = f"{int(engram.sums.images.sum()):,}"
        rows.append(
            ("statistics", f"sums over {images} images: it can learn more, forget and be merged")
        )
    if size is not None:
        document["bytes"] = size
        rows.append(("size", f"{size / 1000:,.1f} KB"))
    return Description(document, _printable_rows(rows))


def describe_bundle(bundle: Bundle) -> Description:
    """Describe a bundle, with a table of its engrams."""
    specs = {engram.spec.name: engram.spec for engram in bundle.engrams}
    costs = [_costs(e, _ancestors(e.spec, specs)) for e in bundle.engrams]
    total = sum(c.macs + c.head_macs for c in costs)
    share = _percent(total / costs[0].backbone_macs)
    manifest = bundle.manifest()
    entries = [
        {
            **entry,
            "kind": engram.spec.kind,
            "classes": list(engram.spec.classes),
            "regime": engram.spec.regime,
            **engram.spec.method.settings(),
            "extends": list(engram.spec.extends),
            "parameters": engram.parameters,
            "metrics": engram.header()["metrics"],
            "costs": {**asdict(cost), "share": cost.share},
        }
        for entry, engram, cost in zip(manifest["engrams"], bundle.engrams, costs, strict=True)
    ]
    rows = [
        ("bundle", str(bundle.folder)),
        ("tasks", f"{len(specs):,}"),
        ("costs", f"{_macs(total)} per image, {share} of the backbone"),
        *_backbone_rows(bundle.engrams[0]),
    ]
    pairs = zip(bundle.engrams, costs, strict=True)
    cells = [_cells(engram, costs=_percent(cost.share)) for engram, cost in pairs]
    document = {"what": "bundle", **manifest, "engrams": entries}
    columns = "task kind classes metric regime settings extends parameters costs"
    return _listing(document, _printable_rows(rows), columns, cells)


def describe_history(bundle: Bundle, task: str | None = None) -> Description:
    """Describe the versions of a task, or of all: which answers, its shadow, and those before."""
    versions: list[tuple[Engram, str, str]] = []
    for current in bundle.engrams if task is None else [bundle.engram(task)]:
        name = current.spec.name
        versions.append((current, "answers", ""))
        if name in bundle.shadows:
            versions.append((bundle.shadows[name], "shadow", ""))
        for one in bundle.older.get(name, ()):
            versions.append((read_version(bundle.folder, name, one.content), "older", one.until))
    document = {
        "versions": [
            {
                "task": engram.spec.name,
                "content": engram.content,
                "state": state,
                "until": until,
                "created": engram.created,
                "metrics": engram.header()["metrics"],
            }
            for engram, state, until in versions
        ]
    }
    cells = [
        _cells(one, version=one.content[:16], state=state, created=one.created, until=until)
        for one, state, until in versions
    ]
    rows = [("bundle", str(bundle.folder))]
    return _listing(document, rows, "task version state metric created until", cells)


def describe_engrams(paths: Sequence[Path]) -> Description:
    """Describe several engrams, by the paths of their files."""
    engrams = {str(path): (read_engram(path), path.stat().st_size) for path in paths}
    document = {
        "engrams": [
            {"file": path, **describe_engram(*engram).document} for path, engram in engrams.items()
        ]
    }
    cells = [_cells(engram, file=path) for path, (engram, _) in engrams.items()]
    return _listing(document, [], "file classes settings extends", cells)


def describe_backbone(backbone: ViT) -> Description:
    """Describe a backbone, with what a pass through it costs."""
    shape, config = BackboneShape.measure(backbone), backbone.config
    preprocessing = backbone.preprocessing
    size = preprocessing.size if preprocessing else config.image_size
    macs = backbone_macs(shape, size)
    named = _SIZES.get((shape.width, shape.depth))
    family = f"ViT-{named}/{shape.patch}" if named else f"ViT with patches of {shape.patch}"
    document = {
        "what": "backbone",
        "source": backbone.source,
        "fingerprint": backbone.fingerprint,
        "family": family,
        "config": asdict(config),
        "parameters": shape.parameters,
        "macs": macs,
        "preprocessing": preprocessing and preprocessing.to_dict(),
        "labels": list(backbone.labels) if backbone.labels else None,
    }
    rows = [
        ("backbone", backbone.source),
        ("family", family),
        ("fingerprint", backbone.fingerprint),
        ("shape", f"{summarise_shape(shape, config.heads)}, {config.activation}"),
        ("parameters", f"{shape.parameters:,} without the head"),
        ("costs", f"{_macs(macs)} per image of {size[0]} x {size[1]}"),
        ("preprocessing", summarise_preprocessing(preprocessing)),
        ("own classes", summarise_names(backbone.class_names) if backbone.class_names else "none"),
    ]
    return Description(document, _printable_rows(rows))


# Sharing


def describe_push(done: Push, dry_run: bool) -> Description:
    """Describe what was sent to the Hub, or would be: then with the headers and the card."""
    at = f"{done.repo} at {done.revision}" if done.revision else done.repo
    contents = {engram.file_name: engram.content for engram in done.engrams}
    files: list[dict[str, Any]] = [
        {
            "file": name,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "content": contents.get(name),
        }
        for name, data in done.files.items()
    ]
    same = ("repo", "revision", "private", "message", "changed", "warnings", "card")
    document = {
        "what": "push",
        "dry_run": dry_run,
        **{name: getattr(done, name) for name in same},
        "url": done.url or None,
        "commit": done.commit or None,
        "files": files,
        "headers": {engram.file_name: engram.header() for engram in done.engrams},
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
    cells = [{**f, "bytes": f"{f['bytes']:,}", "content": f["content"] or ""} for f in files]
    return _listing(document, rows, "file bytes sha256 content", cells)


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
    """Describe the files that a pull wrote, or that were there already."""
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
        (str(one.path), one.task, f"{one.bytes:,}", one.content[:12], one.source,
         "" if one.new else "already there")
        for one in done
    )  # fmt: skip
    return Description(document, [], ("file", "task", "bytes", "content", "from", ""), table)


def describe_list(source: str, found: Sequence[ListedEngram]) -> Description:
    """Describe the engrams in a Hub repository or a folder."""
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
    cells = [
        _cells(one.engram, bytes=f"{one.bytes:,}", content=one.content[:12], source=one.source)
        for one in found
    ]
    rows = [] if found else [("engrams", f"none in {source}")]
    columns = "task classes metric regime extends backbone bytes content source"
    return _listing(document, rows, columns, cells)


# Parts of a description


def _cells(engram: Engram, **others: str) -> dict[str, str]:
    """An engram as cells of a table by column, with others."""
    spec = engram.spec
    settings = (f"{name} {value}" for name, value in spec.method.settings().items() if value)
    return {
        "task": spec.name,
        "kind": spec.kind,
        "classes": f"{len(spec.classes):,}",
        "metric": metric_cell(engram) or "-",
        "regime": spec.regime,
        "settings": ", ".join(settings) or "-",
        "extends": ", ".join(spec.extends) or "-",
        "parameters": f"{engram.parameters:,}",
        "backbone": printable(engram.backbone.source, 60),
        **others,
    }


def _listing(
    document: Any, rows: Rows, columns: str, cells: Sequence[Mapping[str, str]]
) -> Description:
    """A description with a table of these columns."""
    names = tuple(columns.split())
    table = tuple(tuple(row[name] for name in names) for row in cells)
    return Description(document, rows, names, table)


def _backbone_rows(engram: Engram) -> Rows:
    backbone = engram.backbone
    stored = f", in {backbone.dtype}" if backbone.dtype != "fp32" else ""
    return [
        ("backbone", backbone.source + stored),
        ("fingerprint", backbone.fingerprint),
        ("backbone shape", summarise_shape(backbone, backbone.heads)),
        ("preprocessing", summarise_preprocessing(engram.preprocessing)),
    ]


def summarise_shape(shape: BackboneShape, heads: int) -> str:
    return (
        f"width {shape.width}, {shape.depth} layers, patches of {shape.patch}, images of "
        f"{shape.image_size[0]} x {shape.image_size[1]}, {heads} heads"
    )


def summarise_preprocessing(preprocessing: Preprocessing | None) -> str:
    if preprocessing is None:
        return "unknown"
    height, width = preprocessing.size
    how = "squashed" if preprocessing.resize is None else f"cropped from {preprocessing.resize}"
    mean, std = (
        str(values[0]) if len(set(values)) == 1 else ", ".join(map(str, values))
        for values in (preprocessing.mean, preprocessing.std)
    )
    return f"{height} x {width}, {how}, {preprocessing.interpolation}, mean {mean}, std {std}"


def _costs(engram: Engram, ancestors: Sequence[TaskSpec] = ()) -> Costs:
    size = engram.preprocessing.size if engram.preprocessing else None
    return task_costs(engram.backbone, engram.spec, ancestors, size)


def _ancestors(spec: TaskSpec, specs: Mapping[str, TaskSpec]) -> list[TaskSpec]:
    """All tasks that a task reads. In `specs`, parents come before their children."""
    wanted = set(spec.extends)
    for name in reversed(list(specs)):
        if name in wanted:
            wanted.update(specs[name].extends)
    return [specs[name] for name in specs if name in wanted]


def _macs(count: int) -> str:
    for unit, name in ((10**9, "GMAC"), (10**6, "MMAC")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count / 1000:,.1f} kMAC"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _first_values(names: Sequence[str], values: Sequence[float], most: int = 5) -> str:
    first = (f"{name} {value:.4g}" for name, value in zip(names, values[:most], strict=False))
    return ", ".join(first) + (", …" if len(values) > most else "")


def _printable_rows(rows: Rows) -> Rows:
    """Rows that are safe to print, whatever a file contains, without empty ones."""
    return [(label, printable(text, 600)) for label, text in rows if text]
