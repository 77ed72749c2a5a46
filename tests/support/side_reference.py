"""Side network and readout once more, slow and obvious: one image, one task, one row at a time.

Written from the docstrings of `methods/side.py` and `methods/readout.py`, sharing no code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tests.support.reference import embed, gelu, layer_norm, layer_pass
from torch import Tensor

from engram.vit import ViT


@dataclass
class RefSide:
    """The values of one side task; a step is a layer, or the final tokens."""

    name: str
    project: Tensor  # (steps, D, r)
    attention: Tensor  # (steps, 4, r, r): query, key, value, output
    up: Tensor  # (steps, r, 2 r)
    down: Tensor  # (steps, 2 r, r)
    queries: Tensor | None  # (8, r), or none in segmentation
    cells: Tensor  # (steps, m, r)
    extends: tuple[str, ...] = ()
    parents: Tensor | None = None  # (parents, steps, r, r)


def normed_layers(vit: ViT, image: Tensor) -> list[Tensor]:
    """The normed tokens (n, D) of every layer of the plain backbone, and the final ones."""
    x, found = embed(vit, image), []
    nothing, everything = x.new_zeros(0, x.shape[1]), torch.ones(len(x), len(x), dtype=torch.bool)
    for layer in range(vit.config.depth):
        found.append(layer_norm(vit, f"blocks.{layer}.norm1", x))
        x = layer_pass(vit, layer, x, nothing, nothing, everything, [])
    return [*found, layer_norm(vit, "norm", x)]


def norm(row: Tensor) -> Tensor:
    """A row with mean 0 and variance 1."""
    mean = row.sum() / len(row)
    variance = ((row - mean) ** 2).sum() / len(row)
    return (row - mean) / torch.sqrt(variance + 1e-5)


def softmax(scores: Sequence[Tensor]) -> list[Tensor]:
    most = max(score.item() for score in scores)
    shares = [torch.exp(score - most) for score in scores]
    return [share / torch.stack(shares).sum() for share in shares]


def mixed(weights: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    return torch.stack([w * row for w, row in zip(weights, rows, strict=True)]).sum(0)


def climb(layers: Sequence[Tensor], tasks: Sequence[RefSide]) -> dict[str, list[Tensor]]:
    """The rows of every task at the end, a row of r numbers for each token."""
    rank = {task.name: task.cells.shape[2] for task in tasks}
    rows = {n: [layers[0].new_zeros(rank[n]) for _ in layers[0]] for n in rank}
    for step, tokens in enumerate(layers):
        before = dict(rows)
        for task in tasks:
            rows[task.name] = one_step(task, step, tokens, before)
    return rows


def one_step(
    task: RefSide, step: int, tokens: Tensor, rows: Mapping[str, list[Tensor]]
) -> list[Tensor]:
    """The rows of a task after a step, from all tasks' rows before it."""
    h = [row + x @ task.project[step] for row, x in zip(rows[task.name], tokens, strict=True)]
    for i, parent in enumerate(task.extends):
        assert task.parents is not None
        h = [own + row @ task.parents[i, step] for own, row in zip(h, rows[parent], strict=True)]
    normed = [norm(row) for row in h]
    own = [torch.stack(normed).sum(0) / len(normed)]
    read = [*own, *(norm(cell) for cell in task.cells[step])]
    query, key, value, output = task.attention[step]
    for i, row in enumerate(normed):
        scores = [(row @ query) @ (other @ key) / math.sqrt(len(row)) for other in read]
        h[i] = h[i] + 0.3 * (mixed(softmax(scores), [other @ value for other in read]) @ output)
    return [row + 0.3 * (gelu(norm(row) @ task.up[step]) @ task.down[step]) for row in h]


def pooled_side(task: RefSide, rows: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
    """What a head sees of the rows, the last of which are the patches of a grid: (24 r)."""
    assert task.queries is not None
    found = []
    for query in task.queries:
        scores = [query @ row / math.sqrt(len(row)) for row in rows]
        found.append(mixed(softmax(scores), rows))
    pooled = norm(torch.cat(found))
    of_squares = torch.cat(squares(rows[-grid[0] * grid[1] :], grid))
    return torch.cat([pooled, 0.5 * norm(of_squares)])


def squares(patches: Sequence[Tensor], grid: tuple[int, int]) -> list[Tensor]:
    """The mean of each of 4 x 4 squares of a picture whose patches are cut in 4 x 4 pieces."""
    height, width = grid
    found = []
    for down, across in itertools.product(range(4), range(4)):
        pieces = [
            patches[y // 4 * width + x // 4]
            for y in range(down * height, (down + 1) * height)
            for x in range(across * width, (across + 1) * width)
        ]
        found.append(torch.stack(pieces).sum(0) / len(pieces))
    return found


def moments(vit: ViT, tokens: Tensor) -> list[Tensor]:
    """Class token, mean and standard deviation of the patches (D) of a layer's tokens (n, D)."""
    patches = tokens[vit.config.prefix :]
    mean = patches.sum(0) / len(patches)
    spread = torch.sqrt(((patches - mean) ** 2).sum(0) / len(patches))
    return [*([tokens[0]] if vit.config.class_token else []), mean, spread]


def readout(
    vit: ViT, layers: Sequence[Tensor], last: int, grid: tuple[int, int] | None = None
) -> Tensor:
    """The moments of the last layers, the final tokens' first, then the squares of a grid."""
    found: list[Tensor] = []
    for tokens in list(reversed(layers))[:last]:
        found += moments(vit, tokens)
    if grid is not None:
        heights = [len(layers) - 1, round(0.6 * (len(layers) - 1)), round((len(layers) - 1) / 4)]
        for step in sorted(set(heights), reverse=True):
            found += squares(list(layers[step][vit.config.prefix :]), grid)
    return torch.cat(found)
