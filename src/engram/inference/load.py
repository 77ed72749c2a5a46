"""A model from engrams: the backbone they name, with all of them attached."""

from __future__ import annotations

import os
from collections.abc import Sequence

from engram.model import MemoryViT
from engram.store.bundles import read_engrams
from engram.util.hub import PathOrHubId


def load_model(
    sources: PathOrHubId | Sequence[PathOrHubId],
    backbone: PathOrHubId | None = None,
    *,
    backbone_dtype: str = "fp32",
) -> MemoryViT:
    """A model from engrams or bundles: the backbone that they name, with all of them attached.

    Images are prepared as they were when the engrams were trained.

    Args:
        sources: Files of engrams, bundles, or either on the Hub (`hf:owner/name`).
        backbone: Path or Hub id of the backbone, if it is not where the engrams say.
        backbone_dtype: `bf16` keeps the weights of the backbone in half precision: half the memory.

    Returns:
        The model, in evaluation mode.

    Raises:
        EngramError: The engrams do not fit together, or not the backbone.

    Examples:
        >>> model = engram.load_model(["flowers.safetensors"])
        >>> list(model.tasks)
        ['flowers']
    """
    engrams = read_engrams([sources] if isinstance(sources, (str, os.PathLike)) else sources)
    return MemoryViT.of(engrams, backbone, backbone_dtype=backbone_dtype)
