"""An exported file is accepted only if its logits are the model's, within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from engram.export.verify import BATCHES, Difference, compare, generated_pixels
from engram.images.preprocessing import Preprocessing
from engram.inference.engine import Engine, Outputs

PIXELS = generated_pixels(Preprocessing((8, 8), None), sum(BATCHES))


class Fixed(Engine):
    """An engine that answers as a function does."""

    def __init__(self, forward: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self.forward = forward

    def run(self, pixels: Tensor, tasks: Sequence[str], familiarity: bool = False) -> Outputs:
        return self.forward(pixels)


def double(pixels: Tensor) -> dict[str, Tensor]:
    return {"task": 2 * pixels.flatten(1)[:, :5]}


def test_equal_logits_have_no_difference() -> None:
    (found,) = compare(Fixed(double), PIXELS, double(PIXELS)).values()
    assert (found.largest, found.relative, found.agreement) == (0, 0, 1)
    assert found.size == float(double(PIXELS)["task"].abs().max())
    assert found.acceptable("fp32")


def test_a_difference_that_appears_in_one_batch_size_only_is_found() -> None:
    def wrong(pixels: Tensor) -> dict[str, Tensor]:
        return {"task": double(pixels)["task"] + (len(pixels) == max(BATCHES))}

    (found,) = compare(Fixed(wrong), PIXELS, double(PIXELS)).values()
    assert found.largest == pytest.approx(1)
    assert not found.acceptable("fp32")


def test_logits_that_are_not_finite_are_refused() -> None:
    def broken(pixels: Tensor) -> dict[str, Tensor]:
        return {"task": torch.full((len(pixels), 5), math.nan)}

    (found,) = compare(Fixed(broken), PIXELS, double(PIXELS)).values()
    assert found.largest == math.inf
    assert not found.acceptable("fp32")
    assert not found.acceptable("int8")


@pytest.mark.parametrize(
    ("largest", "size", "relative", "float32", "int8"),
    [
        (0.9e-4, 0.1, 0.4, True, True),
        (1.1e-4, 0.1, 0.4, False, True),
        (0.9e-2, 100, 0.6, True, False),
    ],
)
def test_the_tolerance_follows_the_size_of_the_logits(
    largest: float, size: float, relative: float, float32: bool, int8: bool
) -> None:
    found = Difference(largest, relative, 1.0, size)
    assert found.acceptable("fp32") == float32
    assert found.acceptable("int8") == int8
