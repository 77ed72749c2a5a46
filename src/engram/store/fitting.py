"""Engrams that fit together: one backbone, one preprocessing, and the parents that they extend."""

from __future__ import annotations

from collections.abc import Sequence

from engram.backbones.load import check_dtype, load_backbone
from engram.errors import EngramError, flag
from engram.store.engram import Engram
from engram.tasks.spec import check_shared_pass
from engram.util.hub import PathOrHubId
from engram.util.text import printable
from engram.vit import ViT

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
        check_shared_pass(first.spec, engram.spec)
    for where, engram in by_name.values():
        for parent, content in engram.parents.items():
            if parent not in by_name:
                raise EngramError(
                    f"{where} extends {parent!r} (content {content[:12]}), which is not among the "
                    "engrams given; add its file."
                )
            place, given = by_name[parent]
            if given.content != content:
                raise EngramError(
                    f"{where} extends a {parent!r} with the content {content[:12]}, but {place} "
                    f"has {given.content[:12]}; give the one it was trained with."
                )
    ordered: dict[str, Engram] = {}
    while len(ordered) < len(by_name):  # no cycles: a content includes those of the parents
        for name, (_, engram) in by_name.items():
            if engram.parents.keys() <= ordered.keys():
                ordered.setdefault(name, engram)
    return tuple(ordered.values())


def check_same_backbone(
    place: str, engram: Engram, where: str, other: Engram, purpose: str
) -> None:
    """Refuse two engrams of different backbones or preprocessings; `purpose` says for what."""
    found = other.difference(engram.backbone, engram.preprocessing)
    if found:
        raise EngramError(
            f"{where} was trained {found[0]}, as {place} was; engrams {purpose} only on the same "
            "backbone, with the same preprocessing."
        )


def load_engram_backbone(engram: Engram, backbone: PathOrHubId | None, dtype: str = "fp32") -> ViT:
    """Load the backbone of an engram, with the settings that it was trained with.

    `backbone` is the path or Hub id of the backbone, if it is not where the engram says.
    """
    info = engram.backbone
    check_dtype(dtype)
    try:
        return load_backbone(
            info.source if backbone is None else backbone,
            preprocessing=engram.preprocessing,
            antialias=info.antialias,
            heads=info.heads,
            activation=info.activation,
            dtype=dtype,
        )
    except EngramError as error:
        if backbone is not None:
            raise
        raise EngramError(
            f"{error} The engram {engram.spec.name!r} names {printable(info.source)!r} as its "
            f"backbone; give its path or Hub id with {flag('backbone')}."
        ) from None
