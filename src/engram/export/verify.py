"""Does an exported file give the same logits and familiarity as the model it came from?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engram.data.scenes import draw_scenes
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view
from engram.inference.engine import Engine, by_output
from engram.model import MemoryViT

BATCHES = (1, 3, 8)  # sizes to try: any number of images must give the same answers

#: How far a logit may be from the model's, as a share of the largest one (or of 1).
TOLERANCE = 1e-4
#: The same for familiarity: where images differ little, small differences are scaled up.
FAMILIARITY_TOLERANCE = 1e-3
#: Where rounding is intended: norm of the error over norm of the output.
ROUNDING_TOLERANCES = {"bf16": 0.1, "int8": 0.5, "int8 weights": 0.2, "float16 weights": 0.1}


@dataclass(frozen=True)
class Difference:
    """Difference of an exported file's output from the model's on the same images."""

    largest: float  # largest absolute difference
    relative: float  # norm of the difference over norm of the model's output
    agreement: float  # share of images with the same top class, or on the same side of 0
    size: float  # the model's largest absolute value

    def acceptable(self, precision: str, tolerance: float = TOLERANCE) -> bool:
        if precision in ROUNDING_TOLERANCES:
            return self.relative <= ROUNDING_TOLERANCES[precision]
        return self.largest <= tolerance * max(1.0, self.size)


def generated_pixels(preprocessing: Preprocessing, images: int, seed: int = 0) -> Tensor:
    """Generated images (coloured shapes on textures), normalised as the backbone expects them."""
    scenes = draw_scenes(images, seed, max(32, *preprocessing.size)).pixels
    views = np.stack([evaluation_view(scene, preprocessing) for scene in scenes])
    return normalise(torch.from_numpy(views), preprocessing)


def expected_outputs(model: MemoryViT, names: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Generated images, and the model's logits and familiarity for them."""
    pixels = generated_pixels(model.preprocessing, sum(BATCHES))
    with torch.inference_mode():
        outputs = by_output(*model.with_familiarity(pixels.to(model.backbone.device), names))
    return pixels, {name: values.cpu() for name, values in outputs.items()}


def compare(
    engine: Engine, pixels: Tensor, expected: Mapping[str, Tensor]
) -> dict[str, Difference]:
    """Run the images in batches of several sizes, and compare the outputs with those expected."""
    names = [name for name in expected if ":" not in name]  # the others are familiarity
    batches = torch.split(pixels, list(BATCHES))
    parts = [engine.run(batch, names, familiarity=True) for batch in batches]
    return {
        name: _difference(torch.cat([part[name] for part in parts]), outputs)
        for name, outputs in expected.items()
    }


def verified(
    engine: Engine, pixels: Tensor, expected: Mapping[str, Tensor], precision: str, end: str
) -> dict[str, Difference]:
    """Differences of outputs from those expected; too much is an EngramError with this `end`."""
    differences = compare(engine, pixels, expected)
    for name, found in differences.items():
        task, _, familiarity = name.partition(":")
        tolerance = FAMILIARITY_TOLERANCE if familiarity else TOLERANCE
        if not found.acceptable(precision, tolerance):
            how = f"with {precision}, " if precision in ROUNDING_TOLERANCES else ""
            raise EngramError(
                f"The exported {task!r} does not answer as the model does: {how}its "
                f"{'familiarity is' if familiarity else 'logits are'} off by up to "
                f"{found.largest:.2g} (the largest is {found.size:.2g}), so {end}."
            )
    return differences


def _difference(actual: Tensor, expected: Tensor) -> Difference:
    error = actual - expected
    largest = float(error.abs().max()) if bool(actual.isfinite().all()) else float("inf")
    norm = float(expected.norm())
    return Difference(
        largest=largest,
        relative=float(error.norm()) / norm if norm else largest,
        agreement=float((_answer(actual) == _answer(expected)).float().mean()),
        size=float(expected.abs().max()),
    )


def _answer(output: Tensor) -> Tensor:
    """The top class of logits; whether familiarity is below 0."""
    return output.argmax(1) if output.ndim > 1 else output < 0
