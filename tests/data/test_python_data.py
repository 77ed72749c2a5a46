"""Data that is in Python already: every form gives the same splits, and trains the same task."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import refuses
from torch.utils import data as torch_data

from engram import MemoryViT, Recipe, auto, evaluate, fit, load_backbone, sweep
from engram.data.datasets import Splits, load
from engram.errors import Notice
from engram.images.decode import read_image

RNG = np.random.default_rng(0)
LABELS = np.arange(24) % 3
TINTS = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200]])
PIXELS = (TINTS[LABELS][:, None, None] + RNG.integers(-50, 50, (24, 16, 16, 3))).astype(np.uint8)
TENSORS = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
NAMES = ["red", "green", "blue"]


class Pairs(torch_data.Dataset[tuple[Any, int]]):
    """As torchvision has them: images of Pillow, integers, and the names of the classes."""

    classes = NAMES

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return Image.fromarray(PIXELS[i]), int(LABELS[i])


class Stream(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def hub(**more: Any) -> datasets.Dataset:
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=NAMES))
    images = [Image.fromarray(pixels) for pixels in PIXELS]
    return datasets.Dataset.from_dict({"image": images, "label": LABELS.tolist()}, features, **more)


FORMS: dict[str, Callable[[], Any]] = {
    "a dataset of torch": Pairs,
    "a part of a dataset": lambda: torch_data.Subset(Pairs(), range(24)),
    "a loader": lambda: torch_data.DataLoader(Pairs(), batch_size=5, shuffle=True),
    "tensors": lambda: (TENSORS, torch.from_numpy(LABELS)),
    "floats": lambda: (TENSORS / 255, LABELS.tolist()),
    "a dataset of tensors": lambda: torch_data.TensorDataset(TENSORS, torch.from_numpy(LABELS)),
    "arrays": lambda: (PIXELS, LABELS),
    "names": lambda: (list(PIXELS), [NAMES[label] for label in LABELS]),
    "a list of pairs": lambda: list(zip(PIXELS, LABELS, strict=True)),
    "mappings": lambda: [{"image": x, "label": y} for x, y in zip(TENSORS, LABELS, strict=True)],
    "the package datasets": hub,
    "a format of torch": lambda: hub().with_format("torch"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore::engram.errors.Notice")
def test_every_form_gives_the_same_images_and_labels(form: str) -> None:
    splits = load(FORMS[form](), classes=NAMES)
    train = splits["train"]
    assert (splits.unsplit, splits.classes, len(train)) == (True, tuple(NAMES), 24)
    assert train.labels.tolist() == LABELS.tolist()
    found = np.asarray(read_image(train.read(7)))
    assert np.array_equal(found, PIXELS[7])
    assert load(FORMS[form](), split="test", classes=NAMES).test is not None


def test_classes_are_those_that_the_object_names_or_the_numbers() -> None:
    assert load(Pairs()).classes == tuple(NAMES)
    assert load(hub()).classes == tuple(NAMES)
    assert load((PIXELS, LABELS)).classes == ("0", "1", "2")


def test_a_dict_has_splits_of_any_form() -> None:
    part = torch_data.Subset(Pairs(), range(6))
    splits = load({"train": Pairs(), "validation": part, "test": (PIXELS[:9], LABELS[:9])},
                  classes=NAMES)  # fmt: skip
    sizes = [len(splits[name]) for name in ("train", "val", "test")]
    assert (sizes, splits.unsplit, splits.split_by) == ([24, 6, 9], False, "the keys of the dict")
    both = load(datasets.DatasetDict(train=hub(), test=hub()))
    assert both.test is not None
    assert both.val is None


def test_files_are_named_by_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for path, pixels in zip(paths, PIXELS, strict=False):
        Image.fromarray(pixels).save(path)
    train = load((paths, ["a", "b"] * 3))["train"]
    assert train.sample_name(2) == str(paths[2])
    assert train.classes == ("a", "b")


def test_other_kinds_of_task_take_rows_and_masks() -> None:
    rows = torch.nn.functional.one_hot(torch.from_numpy(LABELS), 3)
    for data in ((TENSORS, rows), list(zip(PIXELS, rows, strict=True))):
        both = load(data, kind="multilabel", classes=NAMES)["train"]
        assert both.labels.tolist() == rows.tolist()
    for numbers in (LABELS / 2, list(LABELS / 2)):
        many = load((list(PIXELS), numbers), kind="regression")["train"]
        assert many.labels[:, 0].tolist() == (LABELS / 2).tolist()
    masks = (PIXELS[..., 0] > 100).astype(np.int64)
    for data in (
        (PIXELS, masks),
        (list(PIXELS), list(masks)),
        list(zip(PIXELS, masks, strict=True)),
    ):
        splits = load(data, kind="segmentation")
        assert splits.classes == ("0", "1")
        assert np.array_equal(np.asarray(splits["train"].mask(3)), masks[3] + 1)


REFUSED: list[tuple[Any, str]] = [
    (3, "Data was given as int, which is no data; give a path"),
    (object(), "is no data"),
    (PIXELS, "ndarray holds images without labels; give (images, labels)"),
    ([], "list is empty"),
    ({}, "The dict of splits is empty"),
    ({"train": {"train": Pairs()}}, "Data was given as dict, which is no data"),
    ((PIXELS, LABELS[:5]), "24 images and 5 labels"),
    ((PIXELS, 3), "the labels are a int"),
    ((Pairs(), Pairs()), "a tuple is (images, labels), and its first part is a Pairs"),
    ((TENSORS * 1.0, LABELS), "expected integers from 0 to 255 or floats from 0 to 1"),
    (Stream(), "is an IterableDataset"),
    (torch_data.DataLoader(Stream()), "is an IterableDataset"),
    (hub().to_iterable_dataset(), "load it without streaming=True"),
    (
        torch_data.DataLoader(Pairs(), sampler=torch_data.SubsetRandomSampler([1, 2])),
        "chooses its samples by a SubsetRandomSampler",
    ),
    (
        torch_data.DataLoader(Pairs(), sampler=torch_data.RandomSampler(Pairs(), num_samples=4)),
        "chooses its samples by a RandomSampler",
    ),
]


@pytest.mark.parametrize(("data", "sentence"), REFUSED)
def test_what_cannot_be_taken_is_refused(data: Any, sentence: str) -> None:
    with refuses(sentence):
        load(data)


def test_a_loader_says_what_is_not_used() -> None:
    with pytest.warns(Notice, match="its dataset is used"):
        load(torch_data.DataLoader(Pairs()))


@pytest.fixture
def model(small_backbone: Path) -> MemoryViT:
    return MemoryViT(load_backbone(small_backbone))


@pytest.mark.parametrize("workers", [0, 2])
def test_training_from_objects_is_training_from_arrays(
    model: MemoryViT, tmp_path: Path, workers: int
) -> None:
    recipe = Recipe(steps=3, batch=8, workers=workers)
    metrics = []
    for name, data in (("pairs", Pairs()), ("arrays", (PIXELS, LABELS))):
        model.add_task(name, NAMES, cells=1, seed=0)
        out = tmp_path / f"{name}.safetensors"
        result = fit(model, name, {"train": data, "val": data}, recipe, out=out)
        metrics.append((result.metrics, evaluate(model, data, name, workers=workers)))
    assert metrics[0] == metrics[1]
    with refuses("overwrite=True"):
        fit(
            model,
            "pairs",
            {"train": Pairs(), "val": Pairs()},
            recipe,
            out=tmp_path / "pairs.safetensors",
        )


def test_auto_and_sweep_take_objects(model: MemoryViT) -> None:
    recipe = Recipe(steps=2, batch=8, workers=0)
    assert auto(model, "found", Pairs(), recipe).metrics["val"]["images"] > 0
    sweep(model, "swept", (PIXELS, LABELS), recipe, cells=[1])
    assert model.task("found").spec.classes == tuple(NAMES)
    assert model.task("swept").spec.classes == ("0", "1", "2")


def test_a_line_describes_data() -> None:
    splits = load({"train": Pairs(), "test": Pairs()})
    line = "Splits('dict', classification: train 24, test 24; 3 classes: red, green, blue)"
    assert repr(splits) == line
    assert repr(splits["test"]) == line.replace("Splits", "Dataset").replace("train 24, ", "")
    assert (
        repr(Splits("x", tuple("abcde"))) == "Splits('x', classification: ; 5 classes: a, b, c, …)"
    )
