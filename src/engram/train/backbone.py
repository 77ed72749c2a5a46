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
from engram.train.options import RunOptions
from engram.train.runs.run import backbone_of_run
from engram.util.progress import Progress, silent
from engram.vit import ViT


def backbone_for(
    options: RunOptions,
    splits: Splits,
    *,
    parents: Sequence[str] = (),
    out: Path | None = None,
    announce: Callable[[str], object] = lambda sentence: None,
    progress: Progress = silent,
) -> tuple[ViT, str]:
    """The backbone of a run to `out`, and a sentence that says why it is that one.

    A backbone that is named is taken. With `auto` it is that of the engrams that the task extends
    (`parents`), or of the run that is resumed, and else what `choose_backbone` finds for the size
    of the images. `announce` is called before a download, and where a backbone is only a makeshift.
    """
    size, dtype = options.image_size, options.backbone_dtype
    resumed = out if options.resume else None
    if options.backbone == AUTO and parents:
        engram = read_engram(single_engram_path(parents[0]))
        reason = f"The task extends {engram.spec.name}, which was trained on it."
        if size is None:
            return load_engram_backbone(engram, None, dtype), reason
        choice = BackboneChoice(engram.backbone.source, reason)
    elif options.backbone == AUTO and resumed and (before := backbone_of_run(resumed)):
        choice = BackboneChoice(before, "The run that is resumed began with it.")
    elif options.backbone == AUTO:
        side = typical_side(splits) if size is None else None
        choice = choose_backbone(side, size, announce=announce, progress=progress)
    else:
        choice = BackboneChoice(options.backbone, "It was given with --backbone.")
    return load_backbone(choice.source, image_size=size, dtype=dtype), choice.reason
