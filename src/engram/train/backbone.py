"""The backbone that a run trains on, where the user may have left the choice to the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engram.backbones.load import load_backbone
from engram.backbones.recommended import AUTO, BackboneChoice, choose_backbone
from engram.data.datasets import Splits
from engram.data.overview import typical_side
from engram.store.engram import load_engram_backbone
from engram.store.format import read_engram
from engram.store.remote import single_engram_path
from engram.train.run import backbone_of_run
from engram.util.progress import Progress, silent
from engram.vit import ViT


def backbone_for(
    backbone: str,
    splits: Splits,
    *,
    image_size: int | None = None,
    parents: Sequence[str] = (),
    resumed: Path | None = None,
    dtype: str = "fp32",
    announce: Callable[[str], object] = lambda sentence: None,
    progress: Progress = silent,
) -> tuple[ViT, str]:
    """The backbone of a run, and a sentence that says why it is that one.

    A backbone that is named is taken. With `auto` it is that of the engrams that the task extends
    (`parents`), or of the run that is `resumed` (its engram), and else what `choose_backbone` finds
    for the size of the images. `announce` is called before a download, and where a backbone is only
    a makeshift.
    """
    if backbone == AUTO and parents:
        engram = read_engram(single_engram_path(parents[0]))
        reason = f"The task extends {engram.spec.name}, which was trained on it."
        if image_size is None:
            return load_engram_backbone(engram, None, dtype), reason
        choice = BackboneChoice(engram.backbone.source, reason)
    elif backbone == AUTO and resumed is not None and (before := backbone_of_run(resumed)):
        choice = BackboneChoice(before, "The run that is resumed began with it.")
    elif backbone == AUTO:
        side = typical_side(splits) if image_size is None else None
        choice = choose_backbone(side, image_size, announce=announce, progress=progress)
    else:
        choice = BackboneChoice(backbone, "It was given with --backbone.")
    return load_backbone(choice.source, image_size=image_size, dtype=dtype), choice.reason
