"""`--backbone auto`: which backbone suits images of a size, on this machine at this moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engram.backbones.read import HUB_FILES
from engram.backbones.recommended import PICO, RECOMMENDED, RecommendedBackbone
from engram.errors import EngramError
from engram.util import hub
from engram.util.invocation import program
from engram.util.progress import Progress, silent

AUTO = "auto"
#: Images of up to so many pixels are for pico, which was trained on 32 x 32. Enlarged to the 224 of
#: other backbones they would cost 50 times as much.
SMALL = 48


@dataclass(frozen=True)
class BackboneChoice:
    """A backbone, and why it was chosen."""

    source: str  # as `load_backbone` takes it
    reason: str  # a sentence


def choose_backbone(
    side: float | None,
    image_size: int | None = None,
    *,
    announce: Callable[[str], object] = lambda sentence: None,
    progress: Progress = silent,
) -> BackboneChoice:
    """The bundled backbone for small images, and for others the first recommended one.

    That one is downloaded if it is not in the cache of the Hub. Where it cannot be, another
    recommended one that is there is used, or else the bundled one.

    Args:
        side: The longer side of the images in pixels, usually their median; None if not known.
        image_size: The height and width that the images will have, if not the backbone's own.
        announce: Called with a sentence before a download, and where a backbone is only a
        makeshift.
        progress: Told how far the download is.

    Returns:
        The backbone and the reason. It is on this machine.

    Raises:
        EngramError: No recommended backbone takes this image size, or a download broke off.
    """
    pixels = image_size or side
    if pixels is None:
        return BackboneChoice(PICO, "No image could be read to see how large they are.")
    if pixels <= SMALL:
        return BackboneChoice(PICO, f"The images are small: {pixels:g} pixels.")
    large = f"The images are large ({pixels:g} pixels)"
    candidates = _that_take(image_size)
    best = candidates[0]
    if best.on_this_machine:
        return BackboneChoice(best.repo, f"{large}, and it is recommended for photographs.")
    try:
        _download(best, announce, progress)
    except _NotStarted:
        return _makeshift(large, candidates, announce)
    return BackboneChoice(best.repo, f"{large}, and it is recommended for photographs: downloaded.")


def _that_take(image_size: int | None) -> list[RecommendedBackbone]:
    """The recommended backbones that can cut images of this size into patches."""
    if image_size is None:
        return list(RECOMMENDED)
    found = [backbone for backbone in RECOMMENDED if image_size % backbone.config.patch == 0]
    if not found:
        patches = sorted({backbone.config.patch for backbone in RECOMMENDED})
        raise EngramError(
            f"No recommended backbone takes images of {image_size} pixels; give an --image-size "
            f"that is a multiple of {', '.join(map(str, patches[:-1]))} or {patches[-1]}, or name "
            "a backbone with --backbone."
        )
    return found


class _NotStarted(Exception):
    """A download that did not begin: there is no network."""


def _download(
    backbone: RecommendedBackbone, announce: Callable[[str], object], progress: Progress
) -> None:
    """Fetch a backbone. One that broke off is an EngramError: the next attempt continues it."""
    began = False

    def watched(what: str, done: int, total: int, note: str = "") -> None:
        nonlocal began
        if not began:
            announce(
                f"Downloading {backbone.repo} once, about {backbone.download / 1e6:.0f} MB, into "
                "the cache of the Hub."
            )
        began = True
        progress(what, done, total, note)

    try:
        hub.fetch(backbone.repo, HUB_FILES, may_be_path=False, progress=watched)
    except EngramError as error:
        if began:
            raise
        raise _NotStarted(str(error)) from error


def _makeshift(
    large: str, candidates: list[RecommendedBackbone], announce: Callable[[str], object]
) -> BackboneChoice:
    """What is used where the best backbone can be had neither from the cache nor from the Hub."""
    best = candidates[0]
    fetch = f"{program()} backbones get {best.name}"
    for other in candidates[1:]:
        if other.on_this_machine:
            announce(
                f"The backbone is {other.repo}, which is on this machine; {best.repo} is "
                f"recommended, but cannot be downloaded now. With a network, fetch it: {fetch}"
            )
            reason = f"{large}, and it is a recommended backbone that is on this machine."
            return BackboneChoice(other.repo, reason)
    announce(
        "No recommended ViT is on this machine, and the Hub cannot be reached. So the backbone is "
        "pico, the bundled one, which sees images of 32 x 32 pixels: expect far lower accuracy on "
        "photographs (37 breeds of pets: 19 % with pico, 88 % with a ViT-Ti). With a network, "
        f"fetch a real one: {fetch}"
    )
    return BackboneChoice(
        PICO, f"{large}, but no other backbone is here, and the Hub is out of reach."
    )
