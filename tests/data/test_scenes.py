"""Scenes: the same from the same seed, balanced, and answerable."""

import numpy as np
import pytest

from engram.data.scenes import COUNTS, QUESTIONS, SHAPES, draw_scenes, scene_splits
from engram.errors import EngramError


def test_the_same_seed_draws_the_same_scenes() -> None:
    one, two, other = draw_scenes(30, seed=4), draw_scenes(30, seed=4), draw_scenes(30, seed=5)
    assert np.array_equal(one.pixels, two.pixels)
    assert all(np.array_equal(one.answers[q], two.answers[q]) for q in QUESTIONS)
    assert not np.array_equal(one.pixels, other.pixels)


def test_a_scene_does_not_depend_on_how_many_there_are() -> None:
    few, many = draw_scenes(7), draw_scenes(50)
    assert np.array_equal(few.pixels, many.pixels[:7])
    assert np.array_equal(few.answers["count"], many.answers["count"][:7])


def test_every_shape_occurs_in_every_number_equally_often() -> None:
    scenes = draw_scenes(3 * len(SHAPES) * len(COUNTS))
    pairs = scenes.answers["shape"] * len(COUNTS) + scenes.answers["count"]
    assert np.bincount(pairs).tolist() == [3] * (len(SHAPES) * len(COUNTS))


def test_more_shapes_cover_more_of_a_scene() -> None:
    """The shapes are really drawn: they change the colours."""
    scenes = draw_scenes(200)
    count = scenes.answers["count"]
    spread = scenes.pixels.reshape(200, -1, 3).astype(float).std(1).mean(1)
    assert spread[count == 3].mean() > spread[count == 0].mean()


@pytest.mark.parametrize("size", [16, 32, 64])
def test_scenes_come_in_any_size(size: int) -> None:
    scenes = draw_scenes(20, size=size)
    assert scenes.pixels.shape == (20, size, size, 3)
    assert scenes.pixels.dtype == np.uint8


def test_both_questions_are_about_the_same_images_and_splits_share_none() -> None:
    shape, count = (scene_splits(q, train=40, val=20, test=20, seed=1) for q in QUESTIONS)
    contents = {}
    for split in ("train", "val", "test"):
        hashes = [shape[split].sample_hash(i) for i in range(len(shape[split]))]
        assert hashes == [count[split].sample_hash(i) for i in range(len(count[split]))]
        contents[split] = set(hashes)
    assert len(set.union(*contents.values())) == 80
    assert shape.classes == SHAPES
    assert count.classes == COUNTS


def test_seeds_share_no_image() -> None:
    """A split of one seed must not be another split of the next."""
    hashes: list[str] = []
    for seed in range(3):
        splits = scene_splits("shape", train=5, val=5, test=5, seed=seed)
        hashes += [splits[s].sample_hash(i) for s in ("train", "val", "test") for i in range(5)]
    assert len(set(hashes)) == len(hashes)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(EngramError, match="at least 1"):
        draw_scenes(0)
    with pytest.raises(EngramError, match="shape or count"):
        scene_splits("colour", train=1, val=1, test=1)
