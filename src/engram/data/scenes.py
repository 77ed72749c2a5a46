"""Coloured shapes on textured backgrounds, drawn from a seed: two questions about one image.

Every scene shows one to four copies of one shape in one colour. *Which shape* and *how many* are
asked about the same images. Neither answer says anything about the other, because every shape
occurs in every number equally often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw

from engram.data.datasets import Dataset, Splits
from engram.data.source import Arrays
from engram.errors import EngramError

SHAPES = ("circle", "cross", "square", "star", "triangle")
COUNTS = ("one", "two", "three", "four")
QUESTIONS = {"shape": SHAPES, "count": COUNTS}

_OVERSAMPLING = 4  # shapes are drawn this much larger and then reduced, for smooth edges

#: Distances of a shape's corners from its centre.
_RADII = {"circle": [0.85] * 40, "square": [1.0] * 4, "triangle": [1.0] * 3, "star": [1.0, 0.4] * 5}

Point = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Scenes:
    """Images, uint8 (N, size, size, 3), and for each question the index of every image's answer."""

    pixels: npt.NDArray[np.uint8]
    answers: dict[str, npt.NDArray[np.int64]]


def draw_scenes(number: int, seed: int = 0, size: int = 32) -> Scenes:
    """Draw `number` scenes. Scene i depends on the seed, the size and i, not on `number`."""
    if number < 1 or size < 16:
        raise EngramError(
            f"{number} scenes of {size} pixels cannot be drawn; ask for at least 1 of 16 pixels."
        )
    kinds = len(SHAPES) * len(COUNTS)
    rounds = range(-(-number // kinds))  # every shape in every number before any is repeated
    orders = [np.random.default_rng([seed, i]).permutation(kinds) for i in rounds]
    order = np.concatenate(orders)[:number]
    shapes, counts = order // len(COUNTS), order % len(COUNTS)
    pixels = [
        _scene(np.random.default_rng([seed, 1, i]), SHAPES[shape], count + 1, size)
        for i, (shape, count) in enumerate(zip(shapes.tolist(), counts.tolist(), strict=True))
    ]
    return Scenes(np.stack(pixels), {"shape": shapes, "count": counts})


def scene_splits(
    question: str, *, train: int, val: int, test: int, seed: int = 0, size: int = 32
) -> Splits:
    """Scenes with the answers to "shape" or "count"; both have the same images for one seed."""
    if question not in QUESTIONS:
        raise EngramError(f"There is no question {question!r} about scenes; ask shape or count.")

    def split(name: str, number: int, offset: int) -> Dataset:
        scenes = draw_scenes(number, 3 * seed + offset, size)
        rows = Arrays(torch.from_numpy(scenes.pixels), f"scenes/{name}")
        labels, order = scenes.answers[question], np.arange(number)
        return Dataset("scenes", name, QUESTIONS[question], labels, rows, order)

    return Splits(
        "scenes",
        QUESTIONS[question],
        split("train", train, 0),
        split("val", val, 1),
        split("test", test, 2),
        augment="pad-crop",
    )


def _scene(rng: np.random.Generator, shape: str, count: int, size: int) -> npt.NDArray[np.uint8]:
    back, front = _colours(rng)
    texture = _texture(rng, size)
    background = np.clip(back + 45 * texture[..., None] * rng.uniform(0.4, 1, 3), 0, 255)
    mask = Image.new("L", (size * _OVERSAMPLING, size * _OVERSAMPLING))
    drawing = ImageDraw.Draw(mask)
    for centre, radius in _places(rng, count, size):
        outline = _outline(shape, rng.uniform(0, 2 * math.pi))
        x, y = (_OVERSAMPLING * position for position in centre)
        scale = _OVERSAMPLING * radius
        drawing.polygon([(x + scale * a, y + scale * b) for a, b in outline], fill=255)
    cover = np.asarray(mask.resize((size, size), Image.Resampling.BOX), np.float64)[..., None] / 255
    shaded = np.clip(front + rng.normal(0, 6, (size, size, 1)), 0, 255)
    return np.rint(cover * shaded + (1 - cover) * background).astype(np.uint8)


def _colours(rng: np.random.Generator) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A colour of the background and one of the shapes, which are easy to tell apart."""
    while True:
        back, front = rng.uniform(20, 235, (2, 3))
        if np.linalg.norm(back - front) > 150:
            return back, front


def _texture(rng: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    """Stripes, waves, a gradient or coarse noise, from about -1 to 1, with fine noise on top."""
    y, x = np.mgrid[:size, :size] / size
    angle, phase = rng.uniform(0, 2 * math.pi, 2)
    along = x * math.cos(angle) + y * math.sin(angle)
    across = y * math.cos(angle) - x * math.sin(angle)
    waves = 2 * math.pi * rng.uniform(1, 5)
    kind = rng.integers(4)
    if kind == 0:
        base = np.sin(waves * along + phase)
    elif kind == 1:
        base = np.sin(waves * along + phase) * np.sin(waves * across)
    elif kind == 2:
        base = 2 * along - along.mean() * 2
    else:
        coarse = Image.fromarray(rng.uniform(-1, 1, (6, 6)).astype(np.float32))
        base = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC), np.float64)
    return np.asarray(base + rng.normal(0, 0.15, (size, size)))


def _places(rng: np.random.Generator, count: int, size: int) -> list[tuple[Point, float]]:
    """Centres and radii of shapes that neither touch each other nor leave the image."""
    while True:
        placed: list[tuple[Point, float]] = []
        for _ in range(40):
            radius = size * rng.uniform(0.16, 0.21)
            x, y = rng.uniform(radius, size - radius, 2).tolist()
            if all(math.dist((x, y), at) > radius + other + 1 for at, other in placed):
                placed.append(((x, y), radius))
            if len(placed) == count:
                return placed


def _outline(shape: str, turn: float) -> list[Point]:
    """The corners of a shape within the unit circle."""

    if shape == "cross":  # the corners of two bars
        points = []
        for quarter in range(4):
            c, s = math.cos(turn + quarter * math.pi / 2), math.sin(turn + quarter * math.pi / 2)
            corners = ((1.0, 0.28), (0.28, 0.28), (0.28, 1.0))
            points += [(c * a - s * b, s * a + c * b) for a, b in corners]
        return points
    radii = _RADII[shape]
    step = 2 * math.pi / len(radii)
    angles = [turn + i * step for i in range(len(radii))]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
