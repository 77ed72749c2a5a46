"""Near-duplicates are found from features: pairs, groups, and the nearest rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engram.data.near_duplicates import (
    Pair,
    directions,
    groups_of,
    held_out_groups,
    nearest_rows,
    similar_pairs,
)


def test_similar_features_make_one_group() -> None:
    x = torch.randn(20, 64)
    x[7] = x[3] + 0.05 * torch.randn(64)
    x[11] = x[7] + 0.05 * torch.randn(64)
    groups = groups_of(20, similar_pairs(directions(x)))
    assert groups[3] == groups[7] == groups[11]
    assert len(set(groups.tolist())) == 18


def test_the_nearest_rows_are_those_of_all_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.data.near_duplicates._ROWS", 7)  # in several parts
    unit = directions(torch.randn(30, 8))
    cosines = (unit @ unit.mT).fill_diagonal_(-1)
    found, rows = nearest_rows(unit, 3)
    assert torch.equal(rows, cosines.topk(3).indices)
    assert torch.allclose(found, cosines.topk(3).values)


def test_groups_that_are_known_are_joined_by_pairs() -> None:
    known = np.array([5, 5, 7, 8, 7])
    assert groups_of(5, [], known).tolist() == [0, 0, 2, 3, 2]
    assert groups_of(5, [Pair(3, 4, 1.0)], known).tolist() == [0, 0, 2, 2, 2]


def scenes(classes: int, each: int, frames: int, apart: float = 1.0) -> torch.Tensor:
    """Features of frames of scenes of classes: (classes * each * frames, 64)."""
    centres = 10 * torch.randn(classes, 1, 1, 64)
    things = apart * torch.randn(classes, each, 1, 64)
    return (centres + things + 0.05 * torch.randn(classes, each, frames, 64)).flatten(0, 2)


def test_frames_of_a_scene_are_one_group_and_scenes_of_a_class_are_not() -> None:
    labels = np.repeat(np.arange(3), 5 * 4)
    groups = held_out_groups(scenes(3, 5, 4), labels)  # classes are ten times as far apart
    assert groups.tolist() == np.repeat(np.arange(0, 60, 4), 4).tolist()


def test_a_class_whose_images_all_look_alike_is_one_group() -> None:
    features = torch.cat([scenes(2, 5, 4, apart=10), scenes(1, 1, 20)])
    labels = np.repeat(np.arange(3), 20)
    groups = held_out_groups(features, labels)
    assert len(set(groups[:40].tolist())) == 10
    assert len(set(groups[40:].tolist())) == 1
