"""Does an exported file give the same logits as the model it came from?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram.data.scenes import draw_scenes
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT

BATCHES = (1, 3, 8)  # sizes to try: any number of images must give the same answers

#: How far a logit may be from the model's, as a share of the largest one (or of 1).
TOLERANCE = 1e-4
#: Where rounding is intended: norm of the error over norm of the logits.
ROUNDING_TOLERANCES = {"bf16": 0.1, "int8": 0.5}

Forward = Callable[[Tensor], Mapping[str, Tensor]]  # normalised pixels to logits by task


@dataclass(frozen=True)
class Difference:
    """How the logits of an exported file differ from the model's on the same images."""

    largest: float  # largest absolute difference
    relative: float  # norm of the difference over norm of the model's logits
    agreement: float  # share of images with the same top class
    size: float  # the model's largest absolute logit

    def acceptable(self, precision: str) -> bool:
        if precision in ROUNDING_TOLERANCES:
            return self.relative <= ROUNDING_TOLERANCES[precision]
        return self.largest <= TOLERANCE * max(1.0, self.size)


def generated_pixels(preprocessing: Preprocessing, images: int, seed: int = 0) -> Tensor:
    """Generated images (coloured shapes on textures), normalised as the backbone expects them."""
    scenes = draw_scenes(images, seed, max(32, *preprocessing.size)).pixels
    views = np.stack([evaluation_view(scene, preprocessing) for scene in scenes])
    return normalise(torch.from_numpy(views), preprocessing)


def expected_logits(model: MemoryViT, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Generated images, and the model's logits for them."""
    pixels = generated_pixels(model.preprocessing, sum(BATCHES))
    with torch.inference_mode():
        logits = model(pixels.to(model.backbone.device), names)
    return pixels, {name: values.cpu() for name, values in logits.items()}


def compare(
    forward: Forward, pixels: Tensor, expected: Mapping[str, Tensor]
) -> dict[str, Difference]:
    """Run the images in batches of several sizes, and compare the logits with those expected."""
    parts = [forward(part) for part in torch.split(pixels, list(BATCHES))]
    return {
        name: _difference(torch.cat([part[name] for part in parts]), logits)
        for name, logits in expected.items()
    }


def check_differences(
    differences: Mapping[str, Difference], precision: str, consequence: str
) -> None:
    """Refuse logits that differ too much; the error ends with the `consequence`."""
    for name, found in differences.items():
        if not found.acceptable(precision):
            how = f"with {precision}, " if precision in ROUNDING_TOLERANCES else ""
            raise EngramError(
                f"The exported {name!r} does not answer as the model does: {how}its logits are "
                f"off by up to {found.largest:.2g} (the largest logit is {found.size:.2g}), so "
                f"{consequence}."
            )


def _difference(actual: Tensor, expected: Tensor) -> Difference:
    error = actual - expected
    largest = float(error.abs().max()) if bool(actual.isfinite().all()) else float("inf")
    norm = float(expected.norm())
    return Difference(
        largest=largest,
        relative=float(error.norm()) / norm if norm else largest,
        agreement=float((actual.argmax(1) == expected.argmax(1)).float().mean()),
        size=float(expected.abs().max()),
    )
