"""Items of Python objects: which part is the image, which labels they have, and what is refused."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import refuses

from engram.data.python_data import (
    Items,
    MaskItems,
    class_names,
    item_labels,
    item_parts,
    names_for,
)
from engram.data.source import DataRequest, spread
from engram.images.decode import BadImage, read_image

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)


class Counting:
    """A dataset that declares its labels, and counts how often an item is read."""

    classes = ("cat", "dog")

    def __init__(self, targets: Sequence[int], labels: Sequence[Any]) -> None:
        self.targets, self.labels, self.reads = targets, labels, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        self.reads += 1
        return PIXELS[0], self.labels[i]


def test_every_form_of_an_image_is_read_as_the_same_pixels() -> None:
    tensor = torch.from_numpy(PIXELS[0]).permute(2, 0, 1)
    items = Items([Image.fromarray(PIXELS[0]), PIXELS[0], tensor, tensor / 255], None, "x")
    for row in range(len(items.data)):
        assert np.array_equal(np.asarray(read_image(items.read(row))), PIXELS[0])


def test_an_item_that_cannot_be_read_is_a_bad_image() -> None:
    class Broken(Counting):
        def __getitem__(self, i: int) -> tuple[Any, Any]:
            raise OSError("the disk is gone")

    with pytest.raises(BadImage, match=r"x\[2\]: the disk is gone"):
        Items(Broken([], []), 0, "x").read(2)


def test_labels_that_are_declared_are_used_only_if_the_items_have_them() -> None:
    declared = Counting(torch.arange(100) % 2, [i % 2 for i in range(100)])  # type: ignore[arg-type]
    assert item_labels("x", declared, [1]) == [[i % 2] for i in range(100)]
    assert declared.reads < 10
    changed = Counting([0] * 100, [1] * 100)
    assert item_labels("x", changed, [1]) == [[1]] * 100
    subset = torch.utils.data.Subset(declared, [3, 2])  # type: ignore[arg-type]
    assert item_labels("x", subset, [1]) == [[1], [0]]
    assert class_names(subset) == ["cat", "dog"]


def test_the_parts_of_an_item_are_a_pair_or_columns() -> None:
    request = DataRequest()
    assert item_parts("x", [(PIXELS[0], 1)], request) == (0, [1], ["label"])
    columns = [{"img": PIXELS[0], "target": 1}]
    assert item_parts("x", columns, request) == ("img", ["target"], ["target"])
    for item, sentence in (
        (PIXELS[0], "x[0] is a ndarray"),
        ((1, 2, 3), "x[0] is a tuple of 3"),
        ({"picture": 1, "label": 2}, "x has no column 'image'"),
    ):
        with refuses(sentence):
            item_parts("x", [item], request)


def test_numbers_are_the_classes_of_the_source_or_of_the_task() -> None:
    task = DataRequest(classes=("dog", "cat"))
    assert names_for([0, 1], None, DataRequest()) is None
    assert names_for([0, 1], ["a", "b"], DataRequest()) == ["a", "b"]
    assert names_for([0, 1], None, task) == ["dog", "cat"]
    assert names_for([0, 1], ["cat", "dog"], task) == ["cat", "dog"]
    assert names_for([0, 1], ["a", "b"], DataRequest(classes=("0", "1"))) is None
    assert names_for([3, 7], None, DataRequest(classes=("7", "3"))) is None


def test_an_image_that_is_another_one_each_time_is_refused() -> None:
    class Random(Counting):
        def __getitem__(self, i: int) -> tuple[Any, Any]:
            return np.random.default_rng().integers(0, 256, (4, 4), dtype=np.uint8), 0

    Items([(PIXELS[0], 0)], 0, "x").refuse_random()
    with refuses("x[0] is another image each time it is read"):
        Items(Random([0], [0]), 0, "x").refuse_random()


def test_masks_are_integers_of_any_form() -> None:
    mask = np.arange(30, dtype=np.int64).reshape(5, 6) * 1000
    forms = [mask, torch.from_numpy(mask)[None], Image.fromarray(mask.astype(np.uint16))]
    for row in range(len(forms)):
        assert np.array_equal(np.asarray(MaskItems(forms, None, "x").read(row)), mask)
    with refuses("x[0]: the masks hold float64 values"):
        MaskItems([mask / 2], None, "x").read(0)


def test_content_changes_with_the_images() -> None:
    assert Items(PIXELS, None, "x").content() == Items(list(PIXELS), None, "y").content()
    assert Items(PIXELS, None, "x").content() != Items(PIXELS[::-1], None, "x").content()
    assert spread(3, 8) == [0, 1, 2]
    assert spread(1000, 3) in ([0, 500, 999], [0, 499, 999])
