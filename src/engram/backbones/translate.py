"""Tensors of other libraries under our names, by the tables of `layouts.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.backbones.layouts import LAYER, Layout, find_layout, split_and_join, without_prefix
from engram.errors import EngramError
from engram.util.text import join_names

_SUFFIXES = {
    ".weight": ".weight",
    ".bias": ".bias",
    "/kernel": ".weight",
    "/scale": ".weight",
    "/bias": ".bias",
}


@dataclass(frozen=True)
class Translated:
    """The tensors of a file under our names."""

    source: str  # what errors call the file
    layout: Layout
    tensors: dict[str, Tensor]  # fp32
    missing: Sequence[str] = ()  # parts of concatenated tensors that the file lacks
    surplus: Sequence[str] = ()  # neither in the layout's table nor ignored by it

    def has(self, stem: str) -> bool:
        """Whether there is a tensor of this name, or any of this module."""
        return any(name == stem or name.startswith(f"{stem}.") for name in self.tensors)


def translate(
    tensors: Mapping[str, Tensor], kind: str, source: str, share: bool = False
) -> Translated:
    """Their tensors under our names. A tensor without finite numbers is an EngramError.

    `kind` is what `find_layout` takes. With `share`, what is one fp32 tensor there and here keeps
    its storage; otherwise all are copies.
    """
    tensors = split_and_join(tensors)
    layout = find_layout(kind, tensors)
    stems = {  # their name -> ours, and which part of a concatenation it is
        stem: (ours, part)
        for ours, theirs in layout.names.items()
        for part, stem in enumerate(theirs)
    }
    found: dict[str, dict[int, Tensor]] = {}
    surplus = []
    for full, tensor in tensors.items():
        name = without_prefix(full)
        if any(re.fullmatch(pattern, name) for pattern in layout.ignored):
            continue
        match = _our_name(name, stems)
        if match is None:
            surplus.append(full)
        else:
            found.setdefault(match[0], {})[match[1]] = to_fp32(full, tensor, source, share)
    if not any(piece.numel() for piece in found.get("registers", {}).values()):
        found.pop("registers", None)  # DINOv3 without registers has a tensor for none
    for ours in [name for name in found if layout.zero_biases and name.endswith(".qkv.weight")]:
        biases = found.setdefault(f"{ours.removesuffix('weight')}bias", {})
        for part, weight in found[ours].items():
            biases.setdefault(part, weight.new_zeros(weight.shape[:1]))
    joined = {}
    missing = []
    for ours, pieces in found.items():
        names = layout.their_names(ours)
        missing += [name for part, name in enumerate(names) if part not in pieces]
        if len(pieces) == len(names):
            joined[ours] = _join(ours, [pieces[part] for part in sorted(pieces)], names, source)
    return Translated(source, layout, joined, missing, surplus)


def _our_name(name: str, stems: Mapping[str, tuple[str, int]]) -> tuple[str, int] | None:
    """Our name of one of their tensors, and which part of it that is; None if it is unknown."""
    layer = LAYER.search(name)
    stem = name if layer is None else LAYER.sub("{i}", name, count=1)
    suffix = next((end for end in _SUFFIXES if stem.endswith(end)), "")
    if stem in stems:  # a tensor that is no weight or bias of a module
        (ours, part), suffix = stems[stem], ""
    elif suffix and stem.removesuffix(suffix) in stems:
        (ours, part), suffix = stems[stem.removesuffix(suffix)], _SUFFIXES[suffix]
    else:
        return None
    return ours.replace("{i}", layer[0] if layer else "") + suffix, part


def to_fp32(name: str, tensor: Tensor, source: str, share: bool = False) -> Tensor:
    """Cast a tensor to fp32, after checking that its numbers are finite.

    It is a copy, so that nothing refers to the file any more; with `share`, only if it has to be.
    """
    if tensor.is_meta:
        raise EngramError(
            f"The tensor {name} of {source} has no values yet (it is on the device meta); load "
            "its weights first."
        )
    if not tensor.is_floating_point():
        raise EngramError(
            f"The tensor {name} of {source} holds {tensor.dtype} numbers, not floating-point "
            "ones; quantised weights cannot be read."
        )
    tensor = tensor.detach().to(torch.float32, copy=not share).contiguous()
    if not torch.isfinite(tensor).all():
        raise EngramError(
            f"The tensor {name} of {source} holds NaN or infinite numbers; the file is damaged or "
            "its training went wrong."
        )
    return tensor


def _join(ours: str, pieces: list[Tensor], names: list[str], source: str) -> Tensor:
    if len({piece.shape for piece in pieces}) > 1:
        shapes = ", ".join(f"{n} {tuple(p.shape)}" for n, p in zip(names, pieces, strict=True))
        raise EngramError(f"Tensors of {source} that form one tensor differ in shape: {shapes}.")
    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if ours in ("class_token", "registers", "position") and tensor.numel() and tensor.ndim:
        tensor = tensor.reshape(-1, tensor.shape[-1])  # (1, n, D), (n, D) or (D) -> (n, D)
    return tensor


def check_complete(name: str, missing: Sequence[str], surplus: Sequence[str]) -> None:
    """Refuse a model with missing or surplus tensors."""
    if missing or surplus:
        lacks = f"lacks the tensors {join_names(missing)}" if missing else ""
        has = f"has tensors that no plain ViT has: {join_names(surplus)}" if surplus else ""
        raise EngramError(f"{name} {' and '.join(part for part in (lacks, has) if part)}.")
