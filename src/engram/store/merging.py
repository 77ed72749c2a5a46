"""Merge engrams of one task into one: an average of weights, or sums over images that add up.

Averages are model soups of learning rates, orders of images, seeds. Tasks that were taught and kept
their sums (`engram.tasks.feature_sums`) are solved anew from the sums of all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.errors import EngramError, flag
from engram.store.engram import (
    Engram,
    Located,
    check_same_backbone,
    origin,
    shape_mismatch,
    stored_dtype,
)
from engram.store.format import check_free, read_engram, write_engram
from engram.store.remote import local_path
from engram.tasks.class_statistics import PREFIX
from engram.tasks.feature_sums import FeatureSums
from engram.util.text import join_names, printable

_SLACK = 0.015  # by which the sum of the weights may differ from 1: 0.33,0.33,0.33


def merge(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    weights: Sequence[float] = (),
    task: str | None = None,
    overwrite: bool = False,
) -> Engram:
    """Merge engrams of one task and write the result as an engram.

    Engrams that were taught and kept their statistics become what teaching all images at once would
    have given, unless `weights` are given. They may have different classes; those of the same name
    are one class. Images that both learned count twice.

    All others are averaged. They have to be of one backbone and one spec: the same kind, regime and
    sizes, the same classes in the same order, and the same parents if they extend any. Averages are
    good where trainings began with the same weights: other learning rates or another order of the
    images.

    Args:
        sources: Two or more engrams: paths, or `hf:` ids.
        out: The engram to write.
        weights: The share of each in an average, together 1; all the same if not given.
        task: Name of the task in the new engram; that of the first source if not given.
        overwrite: Replace an existing file.

    Returns:
        The new engram. Its `recipe["merged"]` has the content and weight of every source, and its
        `metrics` are empty, because nothing was measured.

    Raises:
        EngramError: The engrams differ in more than their values, a weight makes no sense, or the
            file exists.

    Examples:
        >>> files = ["flowers.safetensors", "again.safetensors"]
        >>> both = engram.merge(files, "both.safetensors", weights=[0.7, 0.3])
        >>> [source["weight"] for source in both.recipe["merged"]]
        [0.7, 0.3]
    """
    if isinstance(sources, (str, os.PathLike)) or len(sources) < 2:
        raise EngramError("A merge needs at least two engrams; give two or more files.")
    check_free(Path(out), overwrite)
    shares = normalise_weights(weights, len(sources))
    found = [(str(source), read_engram(local_path(source))) for source in sources]
    added = not weights and any(engram.has_sums for _, engram in found)
    merged = _add_up(found) if added else average(found, shares)
    if task is not None:
        merged = merged.renamed(task)
    write_engram(Path(out), merged)
    return merged


def normalise_weights(weights: Sequence[float], count: int) -> list[float]:
    """The weights of so many engrams, which sum to 1; none given: all the same."""
    if not weights:
        return [1 / count] * count
    given = ", ".join(f"{weight:g}" for weight in weights)
    if len(weights) != count:
        raise EngramError(
            f"{flag('weights')} has {len(weights)} numbers ({given}) for {count} engrams; give "
            "one for each."
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise EngramError(
            f"{flag('weights')} is {given}; every weight is a number above 0. Leave out an "
            "engram that should count for nothing."
        )
    if max(weights) > 1 + _SLACK or abs(math.fsum(weights) - 1) > _SLACK:  # fsum can overflow
        parts = [weight / max(weights) for weight in weights]
        such = ",".join(f"{part / math.fsum(parts):.3g}" for part in parts)
        raise EngramError(
            f"{flag('weights')} is {given}, which is {sum(weights):g} together; weights are "
            f"shares of the average and have to sum to 1, such as {such}."
        )
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def average(found: Sequence[Located], shares: Sequence[float]) -> Engram:
    """The weighted mean of engrams that differ in nothing but name and values."""
    place, first = found[0]
    for where, engram in found:
        _check_alike(place, first, where, engram)
    _check_different(found)
    # Without statistics: the average has other features than they are of.
    parts = [engram.without_statistics for _, engram in found]
    method, tensors = first.spec.method.average(parts, shares)
    common = {
        key: value
        for key, value in first.recipe.items()
        if isinstance(value, (str, int, float))
        and all(key in e.recipe and e.recipe[key] == value for _, e in found)
    }
    recipe = {**common, "merged": _lineage(found, shares)}
    spec = replace(first.spec, method=method)
    return replace(first, spec=spec, tensors=tensors, metrics={}, recipe=recipe, **origin())


def _add_up(found: Sequence[Located]) -> Engram:
    """The task that all images of taught engrams at once would have given."""
    place, first = found[0]
    _check_different(found)
    for where, engram in found:
        check_same_backbone(place, first, where, engram, "can be merged")
        if not engram.has_sums:
            raise EngramError(
                f"{where} has no sums of its training images, and others of these engrams have: "
                "images can only be added up where all were taught with "
                f"{flag('statistics', 'on')}. Teach it anew with its images, or average "
                f"the engrams with {flag('weights')}."
            )
    classes = tuple(dict.fromkeys(name for _, engram in found for name in engram.spec.classes))
    numbers = {name: number for number, name in enumerate(classes)}
    sums = FeatureSums.empty(len(classes), first.sums.sums.shape[1])
    for _, engram in found:
        sums += engram.sums.among([numbers[name] for name in engram.spec.classes], len(classes))
    head, images = sums.solve(), float(sums.images.sum())
    tensors = {"head.weight": head.weight.float(), "head.bias": head.bias.float()}
    shares = [float(engram.sums.images.sum()) / images for _, engram in found]
    recipe = {"train_images": int(images), "merged": _lineage(found, shares)}
    return replace(
        first,
        spec=replace(first.spec, classes=classes),
        tensors={**tensors, **sums.tensors(), **_class_statistics(found, sums)},
        metrics={},
        recipe=recipe,
        **origin(),
    )


def _class_statistics(found: Sequence[Located], sums: FeatureSums) -> dict[str, Tensor]:
    """Statistics of all images, if any of the engrams knows what is usual; otherwise nothing."""
    statistics = sums.class_statistics()
    known = [engram for _, engram in found if engram.has_statistics]
    if not known or not statistics.enough(int(sums.images.sum())):
        return {}
    images = torch.stack([engram.sums.images.sum() for engram in known]).float()
    usual = torch.stack([engram.tensors[f"{PREFIX}quantiles"] for engram in known])
    statistics.quantiles.copy_(images @ usual / images.sum())
    spec = known[0].spec
    return {name: t.to(stored_dtype(spec, name)) for name, t in statistics.tensors().items()}


def _lineage(found: Sequence[Located], shares: Sequence[float]) -> list[dict[str, Any]]:
    """The engrams that were merged, as the new one records them."""
    return [
        {"task": engram.spec.name, "content": engram.content, "weight": round(share, 6)}
        for (_, engram), share in zip(found, shares, strict=True)
    ]


def _check_different(found: Sequence[Located]) -> None:
    """Refuse an engram that is there twice."""
    contents: dict[str, str] = {}
    for where, engram in found:
        twin = contents.setdefault(engram.content, where)
        if twin != where:
            raise EngramError(
                f"{twin} and {where} are the same engram (content {engram.content[:12]}); give "
                "one of them. In an average, it can have the weight of both."
            )


def _check_alike(place: str, first: Engram, where: str, other: Engram) -> None:
    """Refuse an engram whose tensors do not mean what those of the first one mean."""
    check_same_backbone(place, first, where, other, "can be merged")
    if first.spec.kind_object.one_class:
        raise EngramError(
            f"{place} has a memory bank of patches, whose average means nothing; fit a task on the "
            "good images of both instead."
        )
    ours, theirs = first.spec.recorded(), other.spec.recorded()
    for name in ("kind", "regime", *sorted(ours.keys() | theirs.keys())):
        if name not in ("name", "classes", "extends") and ours.get(name) != theirs.get(name):
            raise EngramError(
                f"{place} has the {name.replace('_', ' ')} {_value(ours.get(name))}, but {where} "
                f"has {_value(theirs.get(name))}; only tasks of one spec can be merged."
            )
    _check_classes(place, first, where, other)
    if first.parents != other.parents or first.spec.extends != other.spec.extends:
        mine, others = (
            ", ".join(f"{name!r} (content {content[:12]})" for name, content in e.parents.items())
            for e in (first, other)
        )
        raise EngramError(
            f"{place} extends {mine or 'nothing'}, but {where} extends {others or 'nothing'}; only "
            "tasks that extend the same engrams in the same order can be merged."
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in first.without_statistics.items()}
    mismatch = shape_mismatch(other.without_statistics, shapes)
    if mismatch:
        raise EngramError(f"{where} does not fit {place}: {mismatch}.")


def _check_classes(place: str, first: Engram, where: str, other: Engram) -> None:
    ours, theirs = first.spec.classes, other.spec.classes
    noun, nouns = first.spec.kind_object.nouns
    if ours == theirs:
        return
    if set(ours) == set(theirs):
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        raise EngramError(
            f"{place} and {where} have the same {nouns} in another order ({noun} {at + 1} is "
            f"{_value(ours[at])} in the one and {_value(theirs[at])} in the other); train both "
            f"with the same {nouns} in the same order."
        )
    alone = [
        f"only {at} has {join_names(list(map(_value, names)))}"
        for at, names in (
            (place, [name for name in ours if name not in set(theirs)]),
            (where, [name for name in theirs if name not in set(ours)]),
        )
        if names
    ]
    raise EngramError(
        f"{place} and {where} have different {nouns}: {', and '.join(alone)}; only tasks with the "
        f"same {nouns} can be merged. To have both in one pass, use compose."
    )


def _value(value: object) -> str:
    return printable(repr(value) if isinstance(value, str) else str(value), 100)
