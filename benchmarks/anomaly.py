"""Anomaly tasks beside nearest neighbours of the class token: AUROC of images and of pixels.

    python -m benchmarks.anomaly --work FOLDER [--backbone NAME=PATH] [--seeds N] [--pieces N]
                                 [--choose NAME] [--precision NAME] [--data waste,pets]

Two sorts of data, made from the photographs of the assets folder, three seeds each (or as many as
--seeds says for backbones that are given):

- *drawn defects*: of a photograph of a texture, crops of 96 pixels at random places, mirrored and
  turned at random, enlarged to 224. 40 are good images to learn from; of 40 others half have a
  scratch, spots or a pasted piece of another texture, whose masks are known. A seed draws one
  photograph of each of the ten textures.
- *one class is good*: 40 training images of a class are good; of the test images 30 of the same
  class are good and 60 of all other classes are not. A seed draws two classes of a dataset; --data
  says of which datasets.

The task is fitted and evaluated as `fit` and `eval` do it, with everything at its default. The
neighbour is the cosine distance of the class token (or what the backbone pools) to the nearest
training image. Layer, bank and score were chosen on photographs of the train split with a seed of
their own; the ones measured are from the test split. --choose adds that table for a backbone of
this name (such as ViT-Ti/16). On the same photographs, --precision compares a bank in single
precision with one in half precision, which is how files hold it.

anomalib 2.7.0, whose PatchCore would be the peer, requires timm and torchvision, which this project
does not install (CONTRIBUTING.md), so it is not in the table.

Finished pieces stay in the folder, and the same command continues; --pieces ends it after so many.
It takes about five minutes on one idle core with the ViT-Ti of the assets folder, five times as
long with a DINOv2-small, and writes benchmarks/results/anomaly.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor
from torch.nn import functional as F

import engram
from benchmarks.paths import ASSETS, BACKBONE, require_backbone
from benchmarks.report import markdown_table, write_report
from engram.data.datasets import Dataset, Splits
from engram.data.loader import Loader
from engram.images.preprocessing import normalise
from engram.inference.evaluate import answers
from engram.tasks.metrics import anomaly_metrics, image_scores, pixel_histograms
from engram.train.loop.bank import coreset

SIDE, CROP = 224, 96
GOOD, OTHERS = 40, 60
CLASSES = ("waste", "bloodcells", "pets", "leaves", "textures")
SEEDS = (0, 1, 2)
RECIPE = engram.Recipe(workers=0)
Random = np.random.Generator
Picture = Image.Image


# Defects, drawn into textures


def crop(photo: Picture, random: Random) -> Picture:
    """A crop at a random place, mirrored and turned at random, enlarged."""
    x, y = (int(random.integers(0, side - CROP + 1)) for side in photo.size)
    pixels = np.asarray(photo.crop((x, y, x + CROP, y + CROP)))
    pixels = np.rot90(pixels[:, :: random.choice([-1, 1])], int(random.integers(4)))
    return Image.fromarray(np.ascontiguousarray(pixels)).resize(
        (SIDE, SIDE), Image.Resampling.BICUBIC
    )


def scratch(view: Picture, mask: Picture, random: Random, other: Picture) -> Picture:
    place, angle = random.uniform(30, SIDE - 30, 2), random.uniform(0, 2 * np.pi)
    points = [tuple(place)]
    for _ in range(int(random.integers(3, 6))):
        angle += random.normal(0, 0.5)
        step = random.uniform(15, 35) * np.array([np.cos(angle), np.sin(angle)])
        place = np.clip(place + step, 4, SIDE - 5)
        points.append(tuple(place))
    ImageDraw.Draw(mask).line(points, fill=255, width=int(random.integers(2, 5)), joint="curve")
    return shaded(view, mask, random.choice([-1, 1]) * random.uniform(40, 90))


def spots(view: Picture, mask: Picture, random: Random, other: Picture) -> Picture:
    for _ in range(int(random.integers(1, 4))):
        centre, radius = random.uniform(25, SIDE - 25, 2), random.uniform(4, 14, 2)
        box = (*(centre - radius), *(centre + radius))
        ImageDraw.Draw(mask).ellipse(box, fill=255)
    return shaded(view, mask, random.choice([-1, 1]) * random.uniform(30, 65))


def pasted(view: Picture, mask: Picture, random: Random, other: Picture) -> Picture:
    width, height = (int(n) for n in random.integers(18, 56, 2))
    x, y = (int(random.integers(8, SIDE - 8 - side)) for side in (width, height))
    view = view.copy()
    view.paste(crop(other, random).crop((0, 0, width, height)), (x, y))
    ImageDraw.Draw(mask).rectangle((x, y, x + width - 1, y + height - 1), fill=255)
    return view


def shaded(view: Picture, mask: Picture, by: float) -> Picture:
    soft = np.asarray(mask.filter(ImageFilter.GaussianBlur(0.8)), dtype=float)[..., None] / 255
    return Image.fromarray(np.clip(np.asarray(view) + soft * by, 0, 255).astype(np.uint8))


DEFECTS: tuple[Callable[[Picture, Picture, Random, Picture], Picture], ...] = (
    *(scratch, spots, pasted),
)


def write_texture(root: Path, photo: Path, other: Path, seed: Sequence[int]) -> Path:
    """Good crops of a photograph and crops with defects, in the layout of MVTec AD."""
    random = np.random.default_rng(seed)
    whole, piece = (Image.open(path).convert("RGB") for path in (photo, other))
    for folder, count in (("train/good", GOOD), ("test/good", GOOD // 2)):
        (root / folder).mkdir(parents=True)
        for i in range(count):
            crop(whole, random).save(root / folder / f"{i:03}.png")
    for i in range(GOOD // 2):
        draw, mask = DEFECTS[i % 3], Image.new("L", (SIDE, SIDE))
        view = draw(crop(whole, random), mask, random, piece)
        for folder, picture, end in (("test", view, ""), ("ground_truth", mask, "_mask")):
            (root / folder / draw.__name__).mkdir(parents=True, exist_ok=True)
            picture.save(root / folder / draw.__name__ / f"{i:03}{end}.png")
    return root


def photographs(split: str, seed: int) -> list[tuple[Path, Path]]:
    """A photograph of each texture, and one of another texture."""
    random = np.random.default_rng(seed)
    folders = sorted((ASSETS / "data" / "textures" / split).iterdir())
    chosen = [sorted(one.iterdir()) for one in folders]
    found = [paths[int(random.integers(len(paths)))] for paths in chosen]
    return list(zip(found, [*found[1:], found[0]], strict=True))


# One class is good


def one_class(name: str, seed: int) -> Iterator[tuple[str, Splits]]:
    """Two classes of a dataset, each as the good one."""
    whole, random = engram.data.load(ASSETS / "data" / name), np.random.default_rng(seed)
    train, test = whole["train"], whole["test"]
    for good in random.permutation(len(whole.classes))[:2].tolist():

        def some(data: Dataset, wanted: Any, most: int) -> Any:
            return random.permutation(np.flatnonzero(wanted))[:most]

        learned = some(train, train.labels == good, GOOD)
        rows = [*some(test, test.labels == good, GOOD * 3 // 4),
                *some(test, test.labels != good, OTHERS)]  # fmt: skip
        yield whole.classes[good], Splits(
            name, ("anomalous",), train=_anomaly(train.subset(learned), good),
            test=_anomaly(test.subset(rows), good), kind="anomaly",
        )  # fmt: skip


def _anomaly(data: Dataset, good: int) -> Dataset:
    labels = (data.labels != good).astype(np.int64)
    return replace(data, labels=labels, classes=("anomalous",), kind="anomaly")


# Measuring


def measure(backbone: engram.ViT, splits: Splits) -> dict[str, float]:
    """The metrics of a task with everything at its default, and the AUROC of the neighbour."""
    model = engram.MemoryViT(backbone)
    model.add_task("good", **splits.task, regime="patchcore")
    began = time.perf_counter()
    result = engram.fit(model, "good", splits, RECIPE)
    seconds = time.perf_counter() - began
    found = answers(model, splits["test"], "good", workers=0).metrics()
    train, test = (class_tokens(model, splits[split]) for split in ("train", "test"))
    distance = 1 - (test @ train.mT).amax(1, keepdim=True)
    labels = torch.from_numpy(splits["test"].labels)
    near = anomaly_metrics((distance, labels), 0.0)
    expected = result.metrics["val"]["false_alarms"]
    kept = {k: found[k] for k in (*METRICS, "pixel_auroc") if k in found}
    return {**kept, "neighbour": near["auroc"], "expected": expected, "seconds": seconds}


def measure_classes(backbone: engram.ViT, data: str, seed: int) -> list[dict[str, float]]:
    return [measure(backbone, splits) for _, splits in one_class(data, seed)]


CHOICE = ("layers", "bank", "chosen by", "AUROC, max", "AUROC, worst 1 %", "of pixels")
METRICS = ("auroc", "average_precision", "false_alarms", "recall")


@torch.inference_mode()
def class_tokens(model: engram.MemoryViT, dataset: Dataset) -> Tensor:
    loader, found = Loader(dataset, model.preprocessing, 16), []
    for batch in loader.epoch(0):
        pixels = normalise(batch.images, model.preprocessing)
        found.append(F.normalize(model.embed(pixels, ["base"])["base"], dim=1))
    return torch.cat(found)


class Work:
    """A folder with what is done."""

    def __init__(self, folder: Path, pieces: int) -> None:
        self.folder, self.left = folder, pieces
        folder.mkdir(parents=True, exist_ok=True)

    def piece(self, name: str, make: Callable[[], Any]) -> Any:
        """What a function returns, from the folder if it is there."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            if not self.left:
                sys.exit(f"{name} is next; the same command continues.")
            self.left -= 1
            print(name, file=sys.stderr, flush=True)
            path.write_text(json.dumps(make()))
        return json.loads(path.read_text())

    def textures(self, backbone: engram.ViT, seed: int) -> list[dict[str, float]]:
        found = []
        for i, (photo, other) in enumerate(photographs("test", seed)):
            root = self.folder / "textures" / f"{seed}-{i}"
            if not root.exists():
                write_texture(root, photo, other, [seed, i])
            found.append(measure(backbone, engram.data.load(root, kind="anomaly")))
        return found


def chosen_on(folder: Path) -> Iterator[Splits]:
    """Drawn defects in photographs that nothing is measured on."""
    for i, (photo, other) in enumerate(photographs("train", 100)):
        root = folder / "choice" / str(i)
        if not root.exists():
            write_texture(root, photo, other, [100, i])
        yield engram.data.load(root, kind="anomaly")


def compare_precision(backbone: engram.ViT, folder: Path) -> list[dict[str, list[float]]]:
    """AUROC of images and pixels with banks in single and in half precision, by photograph."""
    model, middle = engram.MemoryViT(backbone).eval(), round(0.6 * backbone.config.depth)
    found = []
    for splits in chosen_on(folder):
        train, test = (
            layer_patches(model, splits[one], torch.float32) for one in ("train", "test")
        )
        found.append(
            {
                str(dtype): [
                    scored(train, test, [middle], 1_000, "coreset", dtype)[key]
                    for key in ("1 %", "pixels")
                ]
                for dtype in (torch.float32, torch.float16)
            }
        )
    return found


def choose(backbone: engram.ViT, folder: Path) -> list[list[str]]:
    """AUROC of images and pixels on photographs that nothing is measured on, by setting."""
    model, depth = engram.MemoryViT(backbone).eval(), backbone.config.depth
    features = [
        [layer_patches(model, splits[split]) for split in ("train", "test")]
        for splits in chosen_on(folder)
    ]
    middle = round(0.6 * depth)
    settings = [([layer], 1_000, "coreset") for layer in range(depth // 3, depth + 1)]
    pairs = itertools.pairwise((depth // 3, round(0.5 * depth), round(0.75 * depth), depth))
    settings += [([*pair], 1_000, "coreset") for pair in pairs]
    settings += [([middle], bank, "coreset") for bank in (100, 300, 3_000)]
    settings += [([middle], 1_000, "random"), ([middle], 10**6, "coreset")]
    rows = []
    for layers, bank, how in settings:
        found = [scored(train, test, layers, bank, how) for train, test in features]
        means = [f"{np.mean([one[key] for one in found]):.3f}" for key in ("max", "1 %", "pixels")]
        shown = "all" if bank == 10**6 else f"{bank:,}"
        rows.append([" and ".join(map(str, layers)), shown, how, *means])
    return rows


@torch.inference_mode()
def layer_patches(
    model: engram.MemoryViT, dataset: Dataset, dtype: torch.dtype = torch.float16
) -> dict[Any, Tensor]:
    """The patches of every layer, and the masks."""
    backbone, size = model.backbone, model.preprocessing.size
    found: dict[Any, list[Tensor]] = {}
    for batch in Loader(dataset, model.preprocessing, 16).epoch(0):
        x = backbone.embed(normalise(batch.images, model.preprocessing))

        def keep(layer: int, tokens: Tensor) -> None:
            found.setdefault(layer, []).append(tokens[:, backbone.config.prefix :].to(dtype))

        keep(backbone.config.depth, backbone.norm(backbone.encode(x, size, keep)))
        found.setdefault("labels", []).append(batch.labels)
    return {key: torch.cat(parts) for key, parts in found.items()}


def scored(
    train: dict[Any, Tensor],
    test: dict[Any, Tensor],
    layers: list[int],
    bank: int,
    how: str,
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    def features(found: dict[Any, Tensor]) -> Tensor:
        parts = [F.normalize(found[layer].float(), dim=-1) for layer in layers]
        return F.normalize(torch.cat(parts, -1), dim=-1)

    patches, seen = features(train).flatten(0, 1), features(test)
    if how == "random":
        chosen = patches[torch.randperm(len(patches))[:bank]]
    else:
        chosen = coreset(patches, bank)
    chosen = chosen.to(dtype).float()
    side = round(seen.shape[1] ** 0.5)
    maps = (1 - (seen @ chosen.mT).amax(2)).view(-1, side, side)
    masks = test["labels"]
    labels = (masks != 0).flatten(1).any(1).long()
    counts = pixel_histograms(maps, masks == 1).flatten(1)
    kept = torch.cat([image_scores(maps)[:, None], counts], 1)
    mean = anomaly_metrics((kept, labels), 0.0)
    largest = anomaly_metrics((maps.flatten(1).amax(1, keepdim=True), labels), 0.0)
    return {"max": largest["auroc"], "1 %": mean["auroc"], "pixels": mean["pixel_auroc"]}


AUROCS = ("images", "pixels")
PRECISION = ("backbone", "AUROC of", "fp32", "fp16", "largest difference of a photograph")


def precision_row(
    title: str, what: str, place: int, found: Sequence[dict[str, list[float]]]
) -> list[str]:
    single, half = (
        np.array([one[str(dtype)][place] for one in found])
        for dtype in (torch.float32, torch.float16)
    )
    numbers = (single.mean(), half.mean(), np.abs(single - half).max())
    return [title, what, *(f"{number:.5f}" for number in numbers)]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of the means of seeds."""
    deviation = f" ± {np.std(values):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--backbone", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--pieces", type=int, default=10**6)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--data", default=",".join(CLASSES))
    parser.add_argument("--choose", action="append", default=[], metavar="NAME")
    parser.add_argument("--precision", action="append", default=[], metavar="NAME")
    options = parser.parse_args()
    require_backbone()
    others = dict(one.split("=", 1) for one in options.backbone)
    given = {"ViT-Ti/16": str(BACKBONE)} | others
    work, rows, tables, precision = Work(options.work, options.pieces), [], [], []
    for title, source in given.items():
        name = "".join(c if c.isalnum() else "-" for c in title)
        backbone = engram.load_backbone(source, image_size=SIDE)
        seeds = SEEDS[: options.seeds] if title in others else SEEDS
        pieces = {
            "drawn defects": [
                work.piece(f"{name}-drawn-{seed}", partial(work.textures, backbone, seed))
                for seed in seeds
            ]
        }
        for data in options.data.split(","):
            pieces[f"one class of {data}"] = [
                work.piece(f"{name}-{data}-{seed}", partial(measure_classes, backbone, data, seed))
                for seed in seeds
            ]
        for what, found in pieces.items():
            keys = ("auroc", "neighbour", "pixel_auroc", "expected", "false_alarms", "recall")
            means = {
                key: [float(np.mean([one[key] for one in seed])) for seed in found]
                for key in keys
                if key in found[0][0]
            }
            shown = [spread(means[key]) if key in means else "" for key in keys]
            seconds = np.mean([one["seconds"] for seed in found for one in seed])
            rows.append((title, what, str(len(found)), *shown, f"{seconds:.1f}"))
        if title in options.choose:
            found = work.piece(f"choice-{name}", partial(choose, backbone, options.work))
            tables += ["", f"### {title}", "", *markdown_table(CHOICE, found)]
        if title in options.precision:
            found = work.piece(
                f"precision-{name}", partial(compare_precision, backbone, options.work)
            )
            precision += [precision_row(title, what, i, found) for i, what in enumerate(AUROCS)]
    columns = (
        *("backbone", "data", "seeds", "AUROC", "of the class token's neighbour"),
        *("AUROC of pixels", "false alarms expected", "false alarms", "recall", "seconds of fit"),
    )
    lines = [
        *(__doc__.split("\n\n", 2)[2]).strip().splitlines(),
        "",
        *markdown_table(columns, rows),
    ]
    if tables:
        lines += ["", "## How the settings were chosen", *tables]
    if precision:
        lines += ["", "## The bank in half precision", "", *markdown_table(PRECISION, precision)]
    write_report("anomaly", "Anomalies", lines)


if __name__ == "__main__":
    main()
