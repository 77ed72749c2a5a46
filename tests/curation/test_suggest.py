"""Suggestions: unsure images that are all different, near-copies once, none that is labelled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.curation.suggest import choose

NONE = torch.zeros(0, 32)


def directions(count: int, seed: int = 0) -> Tensor:
    """Vectors that are no near-copies of each other."""
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def rows(
    vectors: Tensor, uncertainty: Tensor | None, count: int, labelled: Tensor = NONE
) -> list[int]:
    return [row for row, _ in choose(vectors, uncertainty, count, labelled)[0]]


def test_unsure_images_come_before_sure_ones() -> None:
    uncertainty = torch.zeros(60)
    uncertainty[[7, 21, 40]] = torch.tensor([0.9, 0.95, 1.0])
    assert sorted(rows(directions(60), uncertainty, 3)) == [7, 21, 40]


def test_a_near_copy_of_a_chosen_image_is_left_out_and_counted() -> None:
    vectors = directions(40)
    copies = vectors[3] + 0.01 * directions(5, seed=1)
    uncertainty = torch.full((45,), 0.1)
    uncertainty[[3, *range(40, 45)]] = 1.0
    chosen, _ = choose(torch.cat([vectors, copies]), uncertainty, 45, NONE)
    same = [(row, count) for row, count in chosen if row == 3 or row >= 40]
    assert len(same) == 1
    assert same[0][1] == 5
    assert len(chosen) == 40


def test_near_copies_of_labelled_images_are_not_suggested() -> None:
    vectors = directions(30)
    chosen, known = choose(vectors, torch.ones(30), 30, vectors[:4] + 1e-3)
    assert known == 4
    assert sorted(row for row, _ in chosen) == list(range(4, 30))


def test_of_equally_unsure_groups_every_one_is_seen_before_any_twice() -> None:
    centres = F.normalize(directions(8), dim=1)
    groups = torch.arange(8).repeat_interleave(6)
    vectors = centres[groups] + 0.12 * directions(48, seed=2)
    chosen = rows(vectors, torch.ones(48), 8)
    assert sorted(groups[chosen].tolist()) == list(range(8))


def test_a_pool_that_is_smaller_than_the_number_is_suggested_whole() -> None:
    assert sorted(rows(directions(3), None, 50)) == [0, 1, 2]
    assert rows(directions(1), None, 50) == [0]


def test_the_same_pool_gives_the_same_suggestions() -> None:
    uncertainty = torch.rand(50, generator=torch.Generator().manual_seed(4))
    assert rows(directions(50), uncertainty, 10) == rows(directions(50), uncertainty, 10)
