"""What an engram, a bundle or a trunk is: as a document for machines, in words for people."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.store.bundles import Bundle, is_bundle, read_bundle
from engram.store.cards import file_of
from engram.store.engram import Engram, summarise_preprocessing, summarise_regime, summarise_shape
from engram.store.format import is_engram, read_engram
from engram.store.remote import CARD, ListedEngram, local_path
from engram.store.sharing import Pulled, Push
from engram.tasks.costs import Costs, task_costs, trunk_macs
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec
from engram.trunks.load import load_trunk
from engram.util.description import Description
from engram.util.text import printable, summarise_names
from engram.vit import ViT

_SIZES = {(192, 12): "Ti", (384, 12): "S", (768, 12): "B", (1024, 24): "L", (1280, 32): "H"}


def describe(source: str | os.PathLike[str]) -> Description:
    """What a file, a folder or a Hub id is. Only a trunk is loaded, and only if it is one."""
    path = local_path(source)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and path.exists():
        raise EngramError(
            f"{path} is a pickle, not an engram; if it is a checkpoint of "
            "transformers-learnable-memory, `engram convert` makes engrams from it."
        )
    if path.is_dir() and is_bundle(path):
        return describe_bundle(read_bundle(path))
    if path.is_file() and (is_engram(path) or not _may_be_trunk(path)):
        return describe_engram(read_engram(path), path.stat().st_size)
    return describe_trunk(load_trunk(source))


def _may_be_trunk(path: Path) -> bool:
    """A whole safetensors header, or an .npz."""
    if path.suffix != ".safetensors":
        return path.suffix == ".npz"
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length < path.stat().st_size and file.read(1) == b"{"


def describe_engram(engram: Engram, size: int | None = None) -> Description:
    spec, trunk = engram.spec, engram.trunk
    costs = _costs(engram)
    document = {
        "what": "engram",
        **engram.header(),
        "content": engram.content,
        "parameters": engram.parameters,
        "costs": _costs_document(costs),
    }
    if spec.does.settled:
        document["settled"] = {
            name: engram.tensors[f"head.{name}"].tolist() for name in spec.does.settled
        }
    rows = [
        ("task", spec.name),
        ("kind", spec.kind),
        (spec.does.nouns[1], summarise_names(spec.classes, nouns=spec.does.nouns)),
        *_settled(engram),
        ("regime", f"{summarise_regime(spec)} ({spec.parts.about})"),
        *[("extends", f"{name}, content {content}") for name, content in engram.parents.items()],
        ("parameters", f"{engram.parameters:,}, {costs.head_parameters:,} of them in the head"),
        ("costs", _costs_words(costs)),
        ("trunk", trunk.source),
        ("fingerprint", trunk.fingerprint),
        ("its shape", f"{summarise_shape(trunk)}, {trunk.heads} heads"),
        ("pictures", summarise_preprocessing(engram.preprocessing)),
        *_facts("metrics", engram.metrics),
        *_facts("recipe", engram.recipe),
        ("created", " by ".join(part for part in (engram.created, engram.library) if part)),
        ("content", engram.content),
    ]
    if size is not None:
        document["bytes"] = size
        rows.append(("size", f"{size / 1000:,.1f} KB"))
    return Description(document, _safe(rows))


def describe_bundle(bundle: Bundle) -> Description:
    specs = {engram.spec.name: engram.spec for engram in bundle.engrams}
    costs = [_costs(e, _ancestors(e.spec, specs)) for e in bundle.engrams]
    extra = sum(c.macs + c.head_macs for c in costs)
    document = {
        "what": "bundle",
        **bundle.manifest(),
        "engrams": [
            {
                **entry,
                "kind": engram.spec.kind,
                "classes": list(engram.spec.classes),
                "regime": engram.spec.regime,
                "cells": engram.spec.cells,
                "extends": list(engram.spec.extends),
                "parameters": engram.parameters,
                "metrics": engram.header()["metrics"],
                "costs": _costs_document(cost),
            }
            for entry, engram, cost in zip(
                bundle.manifest()["engrams"], bundle.engrams, costs, strict=True
            )
        ],
    }
    rows = [
        ("bundle", str(bundle.folder)),
        ("tasks", f"{len(specs):,}"),
        ("costs", f"{_macs(extra)} an image, {_percent(extra / costs[0].trunk_macs)} of the trunk"),
        ("trunk", bundle.trunk.source),
        ("fingerprint", bundle.trunk.fingerprint),
        ("its shape", f"{summarise_shape(bundle.trunk)}, {bundle.trunk.heads} heads"),
        ("pictures", summarise_preprocessing(bundle.preprocessing)),
    ]
    table = tuple(
        (
            engram.spec.name,
            engram.spec.kind,
            f"{len(engram.spec.classes):,}",
            engram.spec.regime,
            str(engram.spec.cells),
            ", ".join(engram.spec.extends) or "-",
            f"{engram.parameters:,}",
            _percent(cost.share),
        )
        for engram, cost in zip(bundle.engrams, costs, strict=True)
    )
    columns = ("task", "kind", "classes", "regime", "cells", "extends", "parameters", "costs")
    return Description(document, _safe(rows), columns, table)


def describe_engrams(paths: Sequence[Path]) -> Description:
    """Several files, told one by one."""
    engrams = [read_engram(path) for path in paths]
    told = [describe_engram(e, p.stat().st_size) for e, p in zip(engrams, paths, strict=True)]
    document = {
        "engrams": [{"file": str(p), **d.document} for p, d in zip(paths, told, strict=True)]
    }
    specs = [engram.spec for engram in engrams]
    table = tuple(
        (str(path), f"{len(spec.classes):,}", str(spec.cells), ", ".join(spec.extends) or "-")
        for path, spec in zip(paths, specs, strict=True)
    )
    return Description(document, [], ("file", "classes", "cells", "extends"), table)


def describe_trunk(trunk: ViT) -> Description:
    shape, config = TrunkShape.of(trunk), trunk.config
    preprocessing = trunk.preprocessing
    size = (preprocessing.size if preprocessing else None) or config.image_size
    macs = trunk_macs(shape, size)
    document = {
        "what": "trunk",
        "source": trunk.source,
        "fingerprint": trunk.fingerprint,
        "family": _family(shape),
        "config": asdict(config),
        "parameters": shape.parameters,
        "macs": macs,
        "preprocessing": preprocessing and preprocessing.to_dict(),
        "labels": list(trunk.labels) if trunk.labels else None,
    }
    rows = [
        ("trunk", trunk.source),
        ("family", _family(shape)),
        ("fingerprint", trunk.fingerprint),
        ("shape", f"{summarise_shape(shape)}, {config.heads} heads, {config.activation}"),
        ("parameters", f"{shape.parameters:,} without its head"),
        ("costs", f"{_macs(macs)} an image of {size[0]} x {size[1]}"),
        ("pictures", summarise_preprocessing(preprocessing)),
        ("own classes", summarise_names(trunk.class_names) if trunk.class_names else "none"),
    ]
    return Description(document, _safe(rows))


def describe_push(done: Push, dry_run: bool) -> Description:
    at = f"{done.repo} at {done.revision}" if done.revision else done.repo
    facts = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in done.files.items()
    }
    contents = {file_of(engram): engram.content for engram in done.engrams}
    headers = {file_of(engram): engram.header() for engram in done.engrams}
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
        "headers": headers,
        "changed": list(done.changed),
        "warnings": list(done.warnings),
        "card": done.card,
    }
    rows = [
        ("would go to" if dry_run else "went to", at),
        *([("url", done.url), ("commit", done.commit)] if done.commit else []),
        ("message", done.message),
        *[("changed", text) for text in done.changed],
        *[("warning", text) for text in done.warnings],
    ]
    if dry_run:
        rows += [
            (f"{file} says", _says(engram))
            for file, engram in zip(headers, done.engrams, strict=True)
        ]
        rows.append((CARD, "\n\n" + done.card))
    table = tuple(
        (name, f"{fact['bytes']:,}", str(fact["sha256"]), contents.get(name, ""))
        for name, fact in facts.items()
    )
    return Description(document, rows, ("file", "bytes", "sha256", "content"), table)


def _says(engram: Engram) -> str:
    """The header, but for shapes and hashes; all of it is in the JSON document."""
    header = engram.header()
    said = {
        "task": engram.spec.name,
        "classes": summarise_names(engram.spec.classes, 12, engram.spec.does.nouns),
    }
    said |= {"trunk": engram.trunk.source}
    said |= {key: header[key] for key in ("metrics", "recipe", "created", "library")}
    return json.dumps(said)


def describe_pull(done: Sequence[Pulled]) -> Description:
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
            "" if one.new else "was there",
        )
        for one in done
    )
    return Description(document, [], ("file", "task", "bytes", "content", "from", ""), table)


def describe_list(source: str, found: Sequence[ListedEngram]) -> Description:
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
                "trunk": one.engram.trunk.source,
                "fingerprint": one.engram.trunk.fingerprint,
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
            one.engram.spec.regime,
            ", ".join(one.engram.spec.extends) or "-",
            printable(one.engram.trunk.source, 60),
            f"{one.bytes:,}",
            one.content[:12],
            one.source,
        )
        for one in found
    )
    columns = ("task", "classes", "regime", "extends", "trunk", "bytes", "content", "source")
    rows = [] if found else [("engrams", f"none in {source}")]
    return Description(document, rows, columns, table)


# In words


def _costs(engram: Engram, ancestors: Sequence[TaskSpec] = ()) -> Costs:
    preprocessing = engram.preprocessing
    size = preprocessing.size if preprocessing else None
    return task_costs(engram.trunk, engram.spec, ancestors, size)


def _ancestors(spec: TaskSpec, specs: Mapping[str, TaskSpec]) -> list[TaskSpec]:
    """All that a task reads; `specs` has parents before children."""
    wanted = set(spec.extends)
    for name in reversed(list(specs)):
        if name in wanted:
            wanted.update(specs[name].extends)
    return [specs[name] for name in specs if name in wanted]


def _costs_document(costs: Costs) -> dict[str, Any]:
    return {**asdict(costs), "share": costs.share}


def _costs_words(costs: Costs) -> str:
    words = (
        f"{_macs(costs.macs + costs.head_macs)} an image, {_percent(costs.share)} of the trunk's "
        f"{_macs(costs.trunk_macs)}"
    )
    return words + (", in a pass of its own" if costs.own_pass else "")


def _macs(count: int) -> str:
    for unit, name in ((10**9, "GMAC"), (10**6, "MMAC")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count / 1000:,.1f} kMAC"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _family(shape: TrunkShape) -> str:
    size = _SIZES.get((shape.width, shape.depth))
    return f"ViT-{size}/{shape.patch}" if size else f"ViT with patches of {shape.patch}"


def _settled(engram: Engram) -> list[tuple[str, str]]:
    """What the task found in its data: thresholds, or means and deviations; the values of masks."""
    spec = engram.spec
    rows = [
        (name, _few_numbers(spec.classes, engram.tensors[f"head.{name}"].tolist()))
        for name in spec.does.settled
    ]
    if spec.does.per_pixel:
        rows.append(("masks", f"{_few_numbers(spec.classes, spec.values)}; ignored: {spec.ignore}"))
    return rows


def _few_numbers(names: Sequence[str], numbers: Sequence[float], most: int = 5) -> str:
    pairs = list(zip(names, numbers, strict=True))
    told = [f"{name} {number:.4g}" for name, number in pairs[:most]]
    return ", ".join(told) + (", …" if len(pairs) > most else "")


def _facts(label: str, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Metrics and settings, those that are one value each."""
    words = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in facts.items()
        if not isinstance(value, (list, dict))
    ]
    return [(label, ", ".join(words))] if words else []


def _safe(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What files say may hold anything; what is printed may not."""
    return [(label, printable(text, 600)) for label, text in rows if text]
