"""Positions that are computed from the grid. Other tests compare them with other libraries."""

from __future__ import annotations

import pytest
import torch
from tests.support.strategies import ROTARY, tiny_backbone

from engram import EngramError, random_backbone
from engram.vit.pos_embed import RotaryConfig, rotation, waves

LIKE = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("name", ROTARY)
def test_scores_of_patches_depend_only_on_how_far_apart_they_are(name: str) -> None:
    """What rotary positions are for."""
    turn = rotation(ROTARY[name], (3, 4), 12, 8, LIKE)
    q, k = (torch.randn(8, dtype=torch.float64).expand(1, 1, 12, 8) for _ in range(2))
    scores = (turn(q) @ turn(k).mT)[0, 0].view(3, 4, 3, 4)
    for y, x in ((0, 1), (1, 0), (1, 2)):
        torch.testing.assert_close(scores[0, 0, y, x], scores[1, 1, 1 + y, 1 + x])
    assert not torch.isclose(scores[0, 0, 0, 1], scores[0, 0, 1, 0])
    torch.testing.assert_close(turn(q).norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize("name", ROTARY)
def test_what_is_no_patch_is_not_turned(name: str) -> None:
    """Class token and registers before the patches; class tokens of tasks and cells behind."""
    turn, x = rotation(ROTARY[name], (2, 3), 8, 4, LIKE), torch.randn(1, 2, 11, 4).double()
    y = turn(x)
    assert torch.equal(y[:, :, :2], x[:, :, :2])
    assert torch.equal(y[:, :, 8:], x[:, :, 8:])
    assert (y[:, :, 3:8] != x[:, :, 3:8]).any(-1).all()


def test_a_larger_grid_spans_the_same_angles() -> None:
    small, large = (rotation(ROTARY["eva02"], (g, g), g * g, 4, LIKE).cos for g in (2, 4))
    torch.testing.assert_close(small.view(2, 2, 4), large.view(4, 4, 4)[::2, ::2])


def test_waves_do_not_depend_on_the_size_of_the_grid() -> None:
    small, large = (waves(grid, 8, LIKE).view(*grid, 8) for grid in ((2, 3), (4, 5)))
    torch.testing.assert_close(small, large[:2, :3])
    assert len({tuple(row.tolist()) for row in large.flatten(0, 1)}) == 20


def test_rotary_positions_count_in_the_fingerprint() -> None:
    """No tensor shows them, and the same tensors would answer differently."""
    plain, *turned = (
        tiny_backbone(rotary=rotary, positions="none") for rotary in (None, *ROTARY.values())
    )
    assert len({backbone.fingerprint for backbone in (plain, *turned)}) == 4


def test_images_of_other_sizes_and_types_have_rotations_of_their_own() -> None:
    backbone = random_backbone(rotary=ROTARY["pe"], width=32, positions="none")
    sizes = [(8 * n, 8) for n in range(1, 12)]
    first = [backbone.tokens(torch.ones(1, 3, *size)) for size in sizes]
    again = [backbone.tokens(torch.ones(1, 3, *size)) for size in sizes[::-1]][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert backbone.double().tokens(torch.ones(1, 3, 8, 8).double()).dtype == torch.float64


def test_heads_that_cannot_be_turned_are_refused() -> None:
    with pytest.raises(EngramError, match="multiple of 4"):
        random_backbone(width=24, heads=4, rotary=RotaryConfig(10.0, 1.0))
