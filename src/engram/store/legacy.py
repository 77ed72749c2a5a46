"""Checkpoints of `necrashter/transformers-learnable-memory` -> engrams.

That is a public re-implementation of the paper. Its `.pt` holds a whole ViT, and for every added
task a class token, cells at every layer (which join behind the norm: `after_norm`) and a
classifier. Whether a task was concatenated or extends the ones before it is written nowhere but in
the attention masks, which are Table 1.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.store.engram import Engram, new_engram
from engram.store.format import read_engram, write_engram
from engram.tasks.spec import TaskSpec, class_names
from engram.trunks.layouts import transformers_layout
from engram.trunks.load import load_trunk
from engram.trunks.translate import their_names, translate
from engram.util import hub
from engram.util.text import printable
from engram.vit import ViT

#: What its authors published on the Hub, the ViT that all four were made from, and their names.
PUBLISHED = "necrashter/transformers-learnable-memory"
PUBLISHED_BASE = "google/vit-base-patch32-224-in21k"
PUBLISHED_FILES = {
    "CIFAR100_model.pt": "cifar100",
    "INaturalist_model.pt": "inaturalist",
    "Places_model.pt": "places",
    "Sun_model.pt": "sun",
}

_PLACES = {
    "token": re.compile(r"vit\.embeddings\.cls_tokens\.(\d+)"),
    "cells": re.compile(r"vit\.encoder\.layer\.(\d+)\.attention\.attention\.memory_tokens\.(\d+)"),
    "mask": re.compile(r"vit\.encoder\.layer\.(\d+)\.attention\.attention\.attention_mask"),
    "head": re.compile(r"classifiers\.(\d+)\.(weight|bias)"),
}


@dataclass(frozen=True)
class _OldTask:
    token: Tensor  # (1, D)
    cells: Tensor  # (l, m, D)
    weight: Tensor
    bias: Tensor


def convert(
    checkpoint: str | os.PathLike[str],
    base: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    raw_pixels: bool | None = None,
) -> list[Path]:
    """Write the tasks of an old checkpoint as engrams, NAME.safetensors in a folder.

    The checkpoints are those of `necrashter/transformers-learnable-memory`. One is opened without
    running anything in it, and refused if it holds more than tensors.

    Args:
        checkpoint: A file, or one on the Hub (`hf:owner/name/FILE.pt`).
        base: Path or Hub id of the ViT that it was made from, whose tensors must be those in the
            checkpoint. Not needed for the four checkpoints that its authors published.
        out: The folder to write into.
        names: A name for each task in the checkpoint.
        raw_pixels: Whether images are not normalised, which is how the training script of that
            implementation fed them. By default only for the published checkpoints.

    Returns:
        The files.

    Raises:
        EngramError: The checkpoint cannot be read, or the base is not the ViT it was made from.

    Examples:
        >>> paths = engram.store.legacy.convert("old.pt", "vit", "engrams")  # doctest: +SKIP
    """
    path, told, published = _locate(checkpoint)
    if base is None:
        if published is None:
            raise EngramError(
                f"Which ViT was {told} made from? Give it with --base: a path or a Hub id."
            )
        base = PUBLISHED_BASE
    if names is None and published is not None:
        names = [published]
    raw_pixels = published is not None if raw_pixels is None else raw_pixels
    tensors = _read(path)
    trunk = load_trunk(base)
    if raw_pixels and trunk.preprocessing is not None:
        trunk.preprocessing = replace(
            trunk.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
        )
    found = {kind: _matching(tensors, pattern) for kind, pattern in _PLACES.items()}
    known = {name for matches in found.values() for name in matches.values()}
    plain = {name: tensor for name, tensor in tensors.items() if name not in known}
    _check_trunk(path, plain, tensors, trunk)
    tasks = _tasks(path, tensors, found, trunk)
    extends = _extends(path, tensors, found["mask"], trunk, [t.cells.shape[1] for t in tasks])
    called = _names(path, names, len(tasks))

    engrams: list[Engram] = []
    for name, task, parents in zip(called, tasks, extends, strict=True):
        spec = TaskSpec(
            name=name,
            classes=class_names(len(task.weight)),
            cells=task.cells.shape[1],
            extends=tuple(called[parent] for parent in parents),
            after_norm=True,
        )
        engrams.append(
            new_engram(
                spec,
                {
                    "class_token": task.token,
                    "cells": task.cells,
                    "head.weight": task.weight,
                    "head.bias": task.bias,
                },
                trunk=trunk,
                parents={called[parent]: engrams[parent].content for parent in parents},
                recipe={"converted_from": told},
            )
        )
    return _write(engrams, Path(out))


def _write(engrams: Sequence[Engram], folder: Path) -> list[Path]:
    places = [folder / f"{engram.spec.name}.safetensors" for engram in engrams]
    for engram, place in zip(engrams, places, strict=True):
        if place.exists() and read_engram(place).content != engram.content:
            raise EngramError(
                f"{place} exists already and is another engram; choose another folder, or other "
                "names with --names."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngramError(
            f"The folder {folder} cannot be made ({error.strerror or error}); choose another one."
        ) from None
    return [write_engram(p, engram) for engram, p in zip(engrams, places, strict=True)]


# What is in the file


def _locate(checkpoint: str | os.PathLike[str]) -> tuple[Path, str, str | None]:
    """Where it lies, how an engram names it, and for a published one the name of its task."""
    if not hub.is_hub_address(checkpoint):
        return Path(checkpoint), Path(checkpoint).name, None
    place = hub.parse_hub_address(checkpoint)
    if place.file is None:
        some = ", ".join(PUBLISHED_FILES) if place.repo == PUBLISHED else "FILE.pt"
        raise EngramError(
            f"{place} is a repository; name one of its checkpoints ({some}), as in "
            f"{place}/{some.partition(',')[0]}."
        )
    folder = hub.fetch(place.repo, [place.file], place.revision, may_be_path=False)
    if not (folder / place.file).is_file():
        raise EngramError(
            f"The Hub repository {place.repo} has no {place.file} at {place.revision or 'main'}, "
            "or it is not in the cache; look at its files on its page."
        )
    named = PUBLISHED_FILES.get(place.file) if place.repo == PUBLISHED else None
    return folder / place.file, str(hub.HubAddress(place.repo, folder.name, place.file)), named


def _read(path: Path) -> dict[str, Tensor]:
    try:
        size = path.stat().st_size
        with warnings.catch_warnings(action="ignore"):  # about pickles that it refuses next
            found = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except OSError as error:
        raise EngramError(
            f"{path} cannot be read ({error.strerror or error}); give the path of a checkpoint."
        ) from None
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" (it asks for {wanted[1]})" if wanted else ""
        raise EngramError(
            f"{path} holds more than tensors{what}, or is damaged, and opening it could run code; "
            "it was not opened. Save the model's state_dict alone."
        ) from None
    except Exception as error:  # whatever torch makes of a file that is none of its own
        raise EngramError(
            f"{path} is not a PyTorch checkpoint, or it is damaged "
            f"({printable(str(error) or type(error).__name__)}); get a good copy."
        ) from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()
    ):
        raise EngramError(
            f"{path} is not a state_dict, which is names and tensors; save model.state_dict()."
        )
    for name, tensor in found.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise EngramError(f"The tensor {printable(name)} of {path} is no plain tensor.")
    if sum(tensor.numel() * tensor.element_size() for tensor in found.values()) > size:
        raise EngramError(f"{path} claims more numbers than it holds; get a good copy.")
    return found


def _matching(
    tensors: Mapping[str, Tensor], pattern: re.Pattern[str]
) -> dict[tuple[str, ...], str]:
    """Names by the parts that a pattern leaves open."""
    matches = ((pattern.fullmatch(name), name) for name in tensors)
    return {match.groups(): name for match, name in matches if match}


def _check_trunk(
    path: Path, plain: dict[str, Tensor], tensors: Mapping[str, Tensor], trunk: ViT
) -> None:
    """The frozen ViT inside must be the base, number for number."""
    first = "vit.embeddings.cls_tokens.0"
    if first not in tensors:
        raise EngramError(
            f"{path} is no checkpoint of transformers-learnable-memory: it has no {first}."
        )
    plain = {**plain, "vit.embeddings.cls_token": tensors[first]}
    layout = transformers_layout("vit", plain)
    inside = translate(plain, layout, str(path))
    expected = {n: p.detach() for n, p in trunk.named_parameters() if not n.startswith("head.")}
    if "prefix_position" in expected:
        expected["position"] = torch.cat([expected.pop("prefix_position"), expected["position"]])
    for ours in sorted({*expected, *inside.tensors}):
        a, b = inside.tensors.get(ours), expected.get(ours)
        if a is None or b is None or a.shape != b.shape or not torch.equal(a, b):
            what = "is there but not in the base" if b is None else "is missing"
            if a is not None and b is not None:
                what = f"has the shape {tuple(a.shape)}, in the base {tuple(b.shape)}"
            if a is not None and b is not None and a.shape == b.shape:
                what = f"differs from the base's by up to {float((a - b).abs().max()):.2g}"
            raise EngramError(
                f"{path} was not trained on {trunk.source} (fingerprint {trunk.fingerprint[:12]}): "
                f"its tensor {' + '.join(their_names(ours, layout))} {what}; give the base that it "
                "was made from."
            )
    if inside.surplus or inside.missing:
        strange = ", ".join(map(printable, (inside.surplus + inside.missing)[:3]))
        raise EngramError(
            f"{path} is no checkpoint of transformers-learnable-memory that can be read: "
            f"{strange} {'is unknown' if inside.surplus else 'is missing'}."
        )


def _tasks(
    path: Path,
    tensors: Mapping[str, Tensor],
    found: Mapping[str, Mapping[tuple[str, ...], str]],
    trunk: ViT,
) -> list[_OldTask]:
    depth, width = trunk.config.depth, trunk.config.width
    count = len(found["token"]) - 1
    if count < 1:
        raise EngramError(f"{path} has no tasks, only the ViT itself; there is nothing to convert.")

    def get(kind: str, *key: object) -> Tensor:
        name = found[kind].get(tuple(map(str, key)))
        if name is None:
            raise EngramError(f"{path} has {count} tasks, but no {kind} {key}; it is incomplete.")
        return tensors[name].float()

    tasks = []
    for i in range(count):
        cells = [get("cells", layer, i) for layer in range(depth)]
        task = [get("token", i + 1), get("head", i + 1, "weight"), get("head", i + 1, "bias")]
        m, classes = cells[0].shape[1] if cells[0].ndim == 3 else -1, task[2].numel()
        shapes = [(1, m, width)] * depth + [(1, 1, width), (classes, width), (classes,)]
        for tensor, shape in zip([*cells, *task], shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise EngramError(
                    f"Task {i + 1} of {path} has a tensor of shape {tuple(tensor.shape)}; expected "
                    f"is {shape}, with as many cells at every layer."
                )
        tasks.append(_OldTask(task[0][0], torch.cat(cells), task[1], task[2]))
    return tasks


def _extends(
    path: Path,
    tensors: Mapping[str, Tensor],
    masks: Mapping[tuple[str, ...], str],
    trunk: ViT,
    cells: Sequence[int],
) -> list[list[int]]:
    """Which earlier tasks each one extends, by the masks: 0 where a token reads, -inf elsewhere.

    Queries are the trunk's tokens and then the tasks' class tokens; keys are those, and then the
    cells task by task.
    """
    n = trunk.config.grid[0] * trunk.config.grid[1] + trunk.config.prefix
    count = len(cells)
    stored = [tensors[masks[str(i),]] for i in range(trunk.config.depth) if (str(i),) in masks]
    shape = (1, n + count, n + count + sum(cells))
    if len(stored) < trunk.config.depth or any(tuple(mask.shape) != shape for mask in stored):
        raise EngramError(
            f"{path} needs an attention mask of shape {shape} at each of its {trunk.config.depth} "
            "layers, and has others or too few; without them it is unknown who reads whom."
        )
    if any(not torch.equal(mask, stored[0]) for mask in stored):
        raise EngramError(f"{path} has attention masks that differ from layer to layer.")
    mask = stored[0][0]
    reads = mask == 0
    reached = [{j for j in range(count) if reads[n + i, n + j]} for i in range(count)]
    if not bool((reads | (mask == -torch.inf)).all()) or not torch.equal(
        reads, _table_1(n, cells, reached)
    ):
        raise EngramError(
            f"{path} has an attention mask that is neither concatenation nor extension of masked "
            "tasks (the paper's Table 1); such a model cannot be written as engrams."
        )
    parents = []
    for i, seen in enumerate(reached):
        above = {grand for j in seen - {i} for grand in reached[j] - {j}}
        if max(seen) > i or not above <= seen:
            raise EngramError(f"{path} has a task {i + 1} that reads others in an unknown way.")
        parents.append(sorted(seen - {i} - above))  # what a parent reads comes with it
    return parents


def _table_1(n: int, cells: Sequence[int], reached: Sequence[set[int]]) -> Tensor:
    count = len(cells)
    owner = torch.tensor([*range(count), *(i for i, m in enumerate(cells) for _ in range(m))])
    table = torch.zeros(n + count, n + len(owner), dtype=torch.bool)
    table[:, :n] = True
    for i, seen in enumerate(reached):
        table[n + i, n:] = torch.isin(owner, torch.tensor([i, *seen]))
    return table


def _names(path: Path, names: Sequence[str] | None, count: int) -> list[str]:
    if names is None:
        return [f"task-{i + 1}" for i in range(count)]
    if len(names) != count or len(set(names)) < count:
        raise EngramError(
            f"{path} has {count} tasks, and the names given are {', '.join(names)}; give "
            f"{count} different ones."
        )
    return list(names)
