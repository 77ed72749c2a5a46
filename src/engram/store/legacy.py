"""Convert legacy checkpoints, those of `necrashter/transformers-learnable-memory`, to engrams.

It is a public re-implementation of the paper. Its `.pt` files hold a whole ViT, and for every added
task a class token, cells at every layer (which are added after the norm: `after_norm`) and a
classifier. Whether a task was concatenated or extends earlier ones shows only in the attention
masks, which are Table 1.
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

from engram.backbones.load import load_backbone
from engram.backbones.translate import translate
from engram.errors import EngramError, flag
from engram.methods import Masked
from engram.store.engram import Engram, new_engram, shape_mismatch
from engram.store.format import read_engram, write_engram
from engram.tasks.spec import TaskSpec, class_names
from engram.util import hub
from engram.util.files import make_folder
from engram.util.text import printable
from engram.util.zip_files import check_archive
from engram.vit import ViT

#: The repository of the published checkpoints, the ViT of all four, and a task name for each.
PUBLISHED = "necrashter/transformers-learnable-memory"
PUBLISHED_BASE = "google/vit-base-patch32-224-in21k"
PUBLISHED_FILES = {
    "CIFAR100_model.pt": "cifar100",
    "INaturalist_model.pt": "inaturalist",
    "Places_model.pt": "places",
    "Sun_model.pt": "sun",
}

_LAYER = "vit.encoder.layer.{}.attention.attention"
_TOKEN = r"vit\.embeddings\.cls_tokens\.\d+"
_OF_TASKS = (
    _TOKEN,
    r"vit\.encoder\.layer\.\d+\.attention\.attention\.(memory_tokens\.\d+|attention_mask)",
    r"classifiers\.\d+\.(weight|bias)",
)


def convert(
    checkpoint: str | os.PathLike[str],
    base: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    raw_pixels: bool | None = None,
) -> list[Path]:
    """Write the tasks of a legacy checkpoint as engrams, NAME.safetensors in a folder.

    Legacy checkpoints are those of `necrashter/transformers-learnable-memory`. Opening one runs no
    code in it, and one that holds more than tensors is refused.

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
    path, source, published = _locate(checkpoint)
    if base is None:
        if published is None:
            raise EngramError(
                f"Which ViT was {source} made from? Give its path or Hub id with {flag('base')}."
            )
        base = PUBLISHED_BASE
    if names is None and published is not None:
        names = [published]
    raw_pixels = published is not None if raw_pixels is None else raw_pixels
    backbone = load_backbone(base)
    if raw_pixels and backbone.preprocessing is not None:
        backbone.preprocessing = replace(
            backbone.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
        )
    old = _Checkpoint(path, _read(path), backbone)
    old.check_backbone()
    tasks = old.tasks()
    extends = old.parents([task["cells"].shape[1] for task in tasks])
    names = list(names or (f"task-{i + 1}" for i in range(len(tasks))))
    if len(names) != len(tasks) or len(set(names)) < len(tasks):
        raise EngramError(
            f"{path} has {len(tasks)} tasks, and the names given are {', '.join(names)}; give "
            f"{len(tasks)} different names."
        )
    engrams: dict[str, Engram] = {}
    for name, task, parents in zip(names, tasks, extends, strict=True):
        method = Masked(cells=task["cells"].shape[1], tokens=1, after_norm=True)
        contents = {names[parent]: engrams[names[parent]].content for parent in parents}
        classes = class_names(len(task["head.bias"]))
        engrams[name] = new_engram(
            TaskSpec(name=name, classes=classes, method=method, extends=tuple(contents)),
            task,
            backbone=backbone,
            parents=contents,
            recipe={"converted_from": source},
        )
    return _write(list(engrams.values()), Path(out))


def _write(engrams: Sequence[Engram], folder: Path) -> list[Path]:
    paths = [folder / engram.file_name for engram in engrams]
    for engram, path in zip(engrams, paths, strict=True):
        if path.exists() and read_engram(path).content != engram.content:
            raise EngramError(
                f"{path} exists already and is another engram; choose another folder, or other "
                f"names with {flag('names')}."
            )
    make_folder(folder)
    return [write_engram(path, engram) for engram, path in zip(engrams, paths, strict=True)]


# Reading a checkpoint


def _locate(checkpoint: str | os.PathLike[str]) -> tuple[Path, str, str | None]:
    """The path, what engrams record as its source, and the task name if it is a published one."""
    if not hub.is_hub_address(checkpoint):
        return Path(checkpoint), Path(checkpoint).name, None
    address = hub.parse_hub_address(checkpoint)
    if address.file is None:
        some = ", ".join(PUBLISHED_FILES) if address.repo == PUBLISHED else "FILE.pt"
        raise EngramError(
            f"{address} is a repository; name one of its checkpoints ({some}), as in "
            f"{address}/{some.partition(',')[0]}."
        )
    folder = hub.fetch(address.repo, [address.file], address.revision, may_be_path=False)
    if not (folder / address.file).is_file():
        raise EngramError(
            f"The Hub repository {address.repo} has no {address.file} at "
            f"{address.revision or 'main'}, or it is not in the cache; its page lists its files."
        )
    name = PUBLISHED_FILES.get(address.file) if address.repo == PUBLISHED else None
    return folder / address.file, str(replace(address, revision=folder.name)), name


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint. Nothing in the file is run."""
    try:
        size, archive = path.stat().st_size, zipfile.is_zipfile(path)
        if archive:
            check_archive(path)
        with warnings.catch_warnings(action="ignore"):  # about pickles that it then refuses
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except OSError as error:
        raise EngramError(
            f"{path} cannot be read ({error.strerror or error}); give the path of a legacy "
            "checkpoint."
        ) from None
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" (it asks for {wanted[1]})" if wanted else ""
        raise EngramError(
            f"{path} holds more than tensors{what}, or is damaged, and opening it could run code; "
            "it was not opened. Save the model's state_dict alone."
        ) from None
    except Exception as error:  # torch raises many types for other files
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
            raise EngramError(f"The tensor {printable(name)} of {path} is not a plain tensor.")
    if sum(tensor.numel() * tensor.element_size() for tensor in found.values()) > size:
        raise EngramError(f"{path} claims more values than it holds; get a good copy.")
    return found


@dataclass(frozen=True)
class _Checkpoint:
    path: Path
    tensors: Mapping[str, Tensor]
    backbone: ViT  # the base

    def check_backbone(self) -> None:
        """Check that the frozen ViT in the checkpoint is exactly the base."""
        first = "vit.embeddings.cls_tokens.0"
        if first not in self.tensors:
            raise EngramError(
                f"{self.path} is not a checkpoint of transformers-learnable-memory: it has no "
                f"{first}."
            )
        vit = {
            name: tensor
            for name, tensor in self.tensors.items()
            if not any(re.fullmatch(pattern, name) for pattern in _OF_TASKS)
        }
        vit["vit.embeddings.cls_token"] = self.tensors[first]
        inside = translate(vit, "vit", str(self.path))
        base = {n: p.detach() for n, p in self.backbone.named_parameters() if n[:5] != "head."}
        if "prefix_position" in base:
            base["position"] = torch.cat([base.pop("prefix_position"), base["position"]])
        for ours in sorted({*base, *inside.tensors}):
            difference = _difference(inside.tensors.get(ours), base.get(ours))
            if difference:
                theirs = " + ".join(inside.layout.their_names(ours))
                raise EngramError(
                    f"{self.path} was not trained on {self.backbone.source} (fingerprint "
                    f"{self.backbone.fingerprint[:12]}): its tensor {theirs} {difference}; give "
                    "the base that it was made from."
                )
        if inside.surplus or inside.missing:
            names = ", ".join(map(printable, [*inside.surplus, *inside.missing][:3]))
            raise EngramError(
                f"{self.path} is not a checkpoint of transformers-learnable-memory that can be "
                f"read: {names} {'is unknown' if inside.surplus else 'is missing'}."
            )

    def tasks(self) -> list[dict[str, Tensor]]:
        """The tensors of each task, as engrams name them."""
        depth, width = self.backbone.config.depth, self.backbone.config.width
        count = sum(bool(re.fullmatch(_TOKEN, name)) for name in self.tensors) - 1
        if count < 1:
            raise EngramError(
                f"{self.path} has no tasks, only the ViT; there is nothing to convert."
            )
        tasks = []
        for i in range(count):
            layers = [f"{_LAYER.format(layer)}.memory_tokens.{i}" for layer in range(depth)]
            token = f"vit.embeddings.cls_tokens.{i + 1}"
            weight, bias = (f"classifiers.{i + 1}.{name}" for name in ("weight", "bias"))
            names = {*layers, token, weight, bias}
            found = {name: self.tensors[name].float() for name in names & self.tensors.keys()}
            cells = [found[name] for name in layers if name in found]
            m = cells[0].shape[1] if cells and cells[0].ndim == 3 else 1
            classes = found[bias].numel() if bias in found else 0
            head = {weight: (classes, width), bias: (classes,)}
            expected = {**dict.fromkeys(layers, (1, m, width)), token: (1, 1, width), **head}
            problem = shape_mismatch(found, expected)
            if problem:
                raise EngramError(f"The task {i + 1} of {self.path} is incomplete: {problem}.")
            tasks.append(
                {
                    "class_token": found[token][0],  # (1, D)
                    "cells": torch.cat(cells),  # (l, m, D)
                    "head.weight": found[weight],
                    "head.bias": found[bias],
                }
            )
        return tasks

    def parents(self, cells: Sequence[int]) -> list[list[int]]:
        """The earlier tasks that each task extends, from the attention masks.

        A mask is 0 where a token reads and -inf elsewhere. Queries are the backbone's tokens, then
        the tasks' class tokens. Keys are the same, then the cells of one task after the other.
        """
        config, count = self.backbone.config, len(cells)
        n = config.grid[0] * config.grid[1] + config.prefix
        names = [f"{_LAYER.format(layer)}.attention_mask" for layer in range(config.depth)]
        masks = [self.tensors[name] for name in names if name in self.tensors]
        shape = (1, n + count, n + count + sum(cells))
        if len(masks) < config.depth or any(tuple(mask.shape) != shape for mask in masks):
            raise EngramError(
                f"{self.path} needs an attention mask of shape {shape} at each of its "
                f"{config.depth} layers, and has others or too few; without them it is unknown "
                "which tasks it extends."
            )
        if any(not torch.equal(mask, masks[0]) for mask in masks):
            raise EngramError(f"{self.path} has attention masks that differ from layer to layer.")
        mask = masks[0][0]
        reads = mask == 0
        reached = [{j for j in range(count) if reads[n + i, n + j]} for i in range(count)]
        if not bool((reads | (mask == -torch.inf)).all()) or not torch.equal(
            reads, _table_1(n, cells, reached)
        ):
            raise EngramError(
                f"{self.path} has an attention mask that is neither concatenation nor extension "
                "of masked tasks (the paper's Table 1); such a model cannot be written as engrams."
            )
        parents = []
        for i, seen in enumerate(reached):
            above = {grand for j in seen - {i} for grand in reached[j] - {j}}
            if max(seen) > i or not above <= seen:
                raise EngramError(
                    f"{self.path} has a task {i + 1} that reads others in an unknown way."
                )
            parents.append(sorted(seen - {i} - above))  # reading a parent includes what it reads
        return parents


def _difference(inside: Tensor | None, base: Tensor | None) -> str:
    """The difference of a tensor from that of the base; empty if there is none."""
    if base is None or inside is None:
        return "is missing" if inside is None else "is not in the base"
    if inside.shape != base.shape:
        return f"has the shape {tuple(inside.shape)}, in the base {tuple(base.shape)}"
    if not torch.equal(inside, base):
        return f"differs from the base's by up to {float((inside - base).abs().max()):.2g}"
    return ""


def _table_1(n: int, cells: Sequence[int], reached: Sequence[set[int]]) -> Tensor:
    """Which query may read which key if each task reads the backbone and the tasks in `reached`."""
    count = len(cells)
    owner = torch.tensor([*range(count), *(i for i, m in enumerate(cells) for _ in range(m))])
    table = torch.zeros(n + count, n + len(owner), dtype=torch.bool)
    table[:, :n] = True
    for i, seen in enumerate(reached):
        table[n + i, n:] = torch.isin(owner, torch.tensor([i, *seen]))
    return table
