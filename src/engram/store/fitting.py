"""Which engrams fit together: one backbone, one preprocessing, and the parents of every child."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engram.errors import EngramError
from engram.store.engram import Engram
from engram.util.text import printable

Located = tuple[str, Engram]  # where an engram was found, for errors, and the engram


def in_order(found: Sequence[Located]) -> tuple[Engram, ...]:
    """The engrams, parents first, after checking everything that needs no backbone."""
    if not found:
        raise EngramError("There are no engrams; give at least one file or bundle.")
    by_name: dict[str, Located] = {}
    for where, engram in found:
        other_place, other = by_name.setdefault(engram.spec.name, (where, engram))
        if other.content != engram.content:
            raise EngramError(
                f"{other_place} and {where} are both called {engram.spec.name!r} but differ "
                f"(content {other.content[:12]} and {engram.content[:12]}); leave one out."
            )
    (first_place, first), *rest = by_name.values()
    for where, engram in rest:
        check_same_backbone(first_place, first, where, engram, "share a pass")
        alone = next((e for e in (first, engram) if not e.spec.method.shares_pass), None)
        if alone is not None:
            raise EngramError(
                f"{alone.spec.name!r} has the regime {alone.spec.regime!r}, which changes the "
                f"backbone's own tokens, so {first.spec.name!r} and {engram.spec.name!r} cannot "
                "share a pass; keep them apart, or train with the regime masked."
            )
    for where, engram in by_name.values():
        _check_parents(where, engram, by_name)
    return _parents_first([engram for _, engram in by_name.values()])


def check_same_backbone(
    where: str, engram: Engram, other_place: str, other: Engram, purpose: str
) -> None:
    """Refuse two engrams of different backbones or preprocessings; `purpose` says for what."""
    if engram.backbone.fingerprint != other.backbone.fingerprint:
        raise EngramError(
            f"{where} was trained on {printable(engram.backbone.source)} (fingerprint "
            f"{engram.backbone.fingerprint[:12]}), but {other_place} on "
            f"{printable(other.backbone.source)} ({other.backbone.fingerprint[:12]}); engrams "
            f"{purpose} only on the same backbone."
        )
    if engram.preprocessing != other.preprocessing:
        both = [e.preprocessing and e.preprocessing.to_dict() for e in (engram, other)]
        raise EngramError(
            f"{where} was trained with the preprocessing {json.dumps(both[0])}, but {other_place} "
            f"with {json.dumps(both[1])}; engrams {purpose} only if they see the same pixels."
        )
    other.check_backbone(engram.backbone, engram.preprocessing)


def _check_parents(where: str, engram: Engram, by_name: Mapping[str, Located]) -> None:
    for parent, content in engram.parents.items():
        if parent not in by_name:
            raise EngramError(
                f"{where} extends {parent!r} (content {content[:12]}), which is not among the "
                "engrams given; add its file."
            )
        parent_place, given = by_name[parent]
        if given.content != content:
            raise EngramError(
                f"{where} extends a {parent!r} with the content {content[:12]}, but {parent_place} "
                f"has {given.content[:12]}; give the one it was trained with."
            )


def _parents_first(engrams: list[Engram]) -> tuple[Engram, ...]:
    """In the given order, but every engram after its parents.

    There are no cycles, because a content hash includes those of the parents.
    """
    ordered: dict[str, Engram] = {}
    while len(ordered) < len(engrams):
        for engram in engrams:
            if engram.parents.keys() <= ordered.keys():
                ordered.setdefault(engram.spec.name, engram)
    return tuple(ordered.values())
