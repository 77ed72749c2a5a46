"""The method once more, slow and obvious: one image, one sequence, one boolean mask.

Written from the paper's Table 1 and Figures 1 to 3 and sharing no code with the package: it
takes the weights of a backbone by name and the values of tasks, and everything else is spelled out.
The sequence of a layer is

    [class, registers, patches | tokens of task 1 | tokens of task 2 | ... | cells of task 1 | ...]

Everything but the cells asks queries; everything gives keys and values; who reads whom is
`may_read`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engram.vit import ViT

BACKBONE = "the backbone"


@dataclass
class RefTask:
    """The values of one task; `extends` names its parents."""

    name: str
    token: Tensor  # (k, D)
    cells: Tensor  # (l, m, D)
    weight: Tensor  # (classes, D)
    bias: Tensor  # (classes,)
    extends: tuple[str, ...] = ()
    after_norm: bool = False
    down: Tensor | None = None  # adapters: (l, 2, D, w) and (l, 2, w, D)
    up: Tensor | None = None


@dataclass
class RefAnswer:
    """What one image gives: the backbone's last tokens (n, D), and each task's token and logits."""

    raw: Tensor
    normed: Tensor
    token: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)


# Table 1


def ancestors(name: str, tasks: Sequence[RefTask]) -> set[str]:
    """All that a task extends: its parents, their parents, and so on."""
    found: set[str] = set()
    for task in tasks:
        if task.name == name:
            for parent in task.extends:
                found |= {parent} | ancestors(parent, tasks)
    return found


def may_read(query: str, key: str, tasks: Sequence[RefTask]) -> bool:
    """Whether a token of the owner `query` reads tokens and cells of the owner `key`."""
    if key == BACKBONE:
        return True
    if query == BACKBONE:
        return False
    return key == query or key in ancestors(query, tasks)


# Pieces of a ViT


def layer_norm(vit: ViT, name: str, x: Tensor) -> Tensor:
    if not has(vit, f"{name}.weight"):
        return x
    if vit.config.norm == "rms":
        mean_square = (x**2).mean(-1, keepdim=True)
        return x / torch.sqrt(mean_square + vit.config.eps) * weight(vit, f"{name}.weight")
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    normed = (x - mean) / torch.sqrt(variance + vit.config.eps)
    return normed * weight(vit, f"{name}.weight") + weight(vit, f"{name}.bias")


def linear(vit: ViT, name: str, x: Tensor) -> Tensor:
    out = x @ weight(vit, f"{name}.weight").T
    return out + weight(vit, f"{name}.bias") if has(vit, f"{name}.bias") else out


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def activate(vit: ViT, x: Tensor) -> Tensor:
    kind = vit.config.activation
    if kind == "quick_gelu":
        return x / (1 + torch.exp(-1.702 * x))
    if kind == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    if kind == "swiglu":
        gate, value = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        return gate / (1 + torch.exp(-gate)) * value
    return gelu(x)


def find(vit: ViT, name: str) -> Any:
    here: Any = vit
    for part in name.split("."):
        here = getattr(here, part, None)
    return here


def weight(vit: ViT, name: str) -> Tensor:
    found = find(vit, name)
    assert isinstance(found, Tensor), name
    return found


def has(vit: ViT, name: str) -> bool:
    return find(vit, name) is not None


def embed(vit: ViT, image: Tensor, class_token: Tensor | None = None) -> Tensor:
    """An image (3, height, width) as the sequence [class, registers, patches]: (n, D)."""
    size = vit.config.patch
    prefix = []
    if class_token is None and has(vit, "class_token"):
        class_token = weight(vit, "class_token")
    if class_token is not None:
        prefix.append(class_token[0])
    if has(vit, "registers"):
        prefix += list(weight(vit, "registers"))
    for i in range(vit.config.prefix_positions if prefix else 0):
        prefix[i] = prefix[i] + weight(vit, "prefix_position")[i]
    patches = []
    for top in range(0, image.shape[1], size):
        for left in range(0, image.shape[2], size):
            square = image[:, top : top + size, left : left + size]
            patch = (weight(vit, "patch.weight") * square).sum((1, 2, 3))
            if has(vit, "patch.bias"):
                patch = patch + weight(vit, "patch.bias")
            patch = layer_norm(vit, "patch_norm", patch)
            patches.append(patch + position(vit, top // size, left // size))
    return layer_norm(vit, "pre_norm", torch.stack([*prefix, *patches]))


def position(vit: ViT, y: int, x: int) -> Tensor:
    """What is added to the patch in a row and a column."""
    columns, quarter = vit.config.grid[1], vit.config.width // 4
    if vit.config.positions == "none":
        return torch.zeros(())
    if vit.config.positions == "learned":
        return weight(vit, "position")[y * columns + x]
    speeds = [10_000 ** (-i / quarter) for i in range(quarter)]
    waves = [wave(at * speed) for at in (x, y) for wave in (math.sin, math.cos) for speed in speeds]
    return torch.tensor(waves, dtype=torch.float64)


def turned(vit: ViT, rows: Tensor, first: int) -> Tensor:
    """Queries or keys (n, D) with those of the patches, from the `first`, turned by their place.

    As complex numbers: pair i of a head is multiplied by e to the power of its angle times i.
    """
    rotary = vit.config.rotary
    if rotary is None:
        return rows
    d, out = vit.config.width // vit.config.heads, list(rows)
    firsts = list(range(d // 2)) if rotary.halves else list(range(0, d, 2))
    seconds = [i + d // 2 if rotary.halves else i + 1 for i in firsts]
    for y in range(vit.config.grid[0]):
        for x in range(vit.config.grid[1]):
            places = [
                (at + rotary.offset) / of * rotary.span + rotary.start
                for at, of in zip((y, x), vit.config.grid, strict=True)
            ]
            places = places[::-1] if rotary.columns_first else places
            angles = [at * rotary.base ** (-4 * i / d) for at in places for i in range(d // 4)]
            angle = torch.tensor(angles, dtype=rows.dtype)
            token = first + y * vit.config.grid[1] + x
            by_head = rows[token].view(-1, d)
            pairs = torch.complex(by_head[:, firsts], by_head[:, seconds])
            pairs = pairs * torch.complex(torch.cos(angle), torch.sin(angle))
            new = torch.zeros_like(by_head)
            new[:, firsts], new[:, seconds] = pairs.real, pairs.imag
            out[token] = new.flatten()
    return torch.stack(out)


def enter(vit: ViT, token: Tensor) -> Tensor:
    """A task's class tokens at the first layer: with the position embedding of position 0."""
    if has(vit, "class_token") and has(vit, "prefix_position"):
        token = token + weight(vit, "prefix_position")[0]
    return layer_norm(vit, "pre_norm", token)


def attention(
    vit: ViT, layer: int, keys: Tensor, queries: int, allowed: Tensor, first: int
) -> Tensor:
    """What the first `queries` of the normed tokens (n, D) read, head by head."""
    D = vit.config.width
    d = D // vit.config.heads
    q, k, v = linear(vit, f"blocks.{layer}.qkv", keys).split(D, dim=1)
    q, k = turned(vit, q, first), turned(vit, k, first)
    heads = []
    for head in range(vit.config.heads):
        part = slice(head * d, (head + 1) * d)
        scores = q[:queries, part] @ k[:, part].T / math.sqrt(d)
        scores = torch.where(allowed, scores, -math.inf)
        shares = torch.exp(scores - scores.detach().amax(1, keepdim=True))
        heads.append(shares / shares.sum(1, keepdim=True) @ v[:, part])
    read = layer_norm(vit, f"blocks.{layer}.read_norm", torch.cat(heads, dim=1))
    return linear(vit, f"blocks.{layer}.proj", read)


def scaled(vit: ViT, name: str, x: Tensor) -> Tensor:
    return x * weight(vit, name) if has(vit, name) else x


def layer_pass(
    vit: ViT,
    layer: int,
    x: Tensor,
    cells_before: Tensor,
    cells_after: Tensor,
    allowed: Tensor,
    adapters: Sequence[tuple[range, Tensor, Tensor]],
    first: int | None = None,
) -> Tensor:
    """One layer: cells join before (or, in foreign files, after) its first norm, and are dropped.

    `adapters` say which tokens pass through which (down, up), beside attention and beside the MLP;
    `first`, which token is the first patch.
    """
    first = vit.config.prefix if first is None else first
    n = len(x)
    normed = layer_norm(vit, f"blocks.{layer}.norm1", torch.cat([x, cells_before]))
    keys = torch.cat([normed, cells_after])
    read = attention(vit, layer, keys, n, allowed, first)
    x = x + scaled(vit, f"blocks.{layer}.scale1", read)
    x = _adapt(x, normed, layer, 0, adapters)
    normed = layer_norm(vit, f"blocks.{layer}.norm2", x)
    inner = activate(vit, linear(vit, f"blocks.{layer}.mlp.fc1", normed))
    inner = layer_norm(vit, f"blocks.{layer}.mlp.norm", inner)
    thought = linear(vit, f"blocks.{layer}.mlp.fc2", inner)
    x = x + scaled(vit, f"blocks.{layer}.scale2", thought)
    return _adapt(x, normed, layer, 1, adapters)


def _adapt(
    x: Tensor,
    normed: Tensor,
    layer: int,
    place: int,
    adapters: Sequence[tuple[range, Tensor, Tensor]],
) -> Tensor:
    rows = list(x)
    for span, down, up in adapters:
        for row in span:
            rows[row] = rows[row] + gelu(normed[row] @ down[layer, place]) @ up[layer, place]
    return torch.stack(rows)


# Masked: Table 1


def masked(vit: ViT, image: Tensor, tasks: Sequence[RefTask]) -> RefAnswer:
    """All tasks beside the backbone, in one sequence with one mask."""
    backbone = embed(vit, image)
    parts, owners = [backbone], [BACKBONE] * len(backbone)
    spans = {}
    for task in tasks:
        spans[task.name] = range(len(owners), len(owners) + len(task.token))
        parts.append(enter(vit, task.token))
        owners += [task.name] * len(task.token)
    x = torch.cat(parts)

    before = [task for task in tasks if not task.after_norm]
    after = [task for task in tasks if task.after_norm]
    cell_owners = [t.name for t in [*before, *after] for _ in range(t.cells.shape[1])]
    allowed = torch.tensor(
        [[may_read(query, key, tasks) for key in owners + cell_owners] for query in owners]
    )
    adapters = [
        (spans[t.name], t.down, t.up) for t in tasks if t.down is not None and t.up is not None
    ]
    nothing = x.new_zeros(0, x.shape[1])
    for layer in range(vit.config.depth):
        cells_before = torch.cat([nothing, *(task.cells[layer] for task in before)])
        cells_after = torch.cat([nothing, *(task.cells[layer] for task in after)])
        x = layer_pass(vit, layer, x, cells_before, cells_after, allowed, adapters)

    answer = RefAnswer(x[: len(backbone)], layer_norm(vit, "norm", x[: len(backbone)]))
    for task in tasks:
        span = spans[task.name]
        normed = layer_norm(vit, "norm", x[span.start : span.stop])
        answer.token[task.name] = normed
        answer.logits[task.name] = task.weight @ normed.mean(0) + task.bias
    return answer


# Full attention: every token reads the cells; Figure 2b


def unmasked(
    vit: ViT,
    image: Tensor,
    token: Tensor | None = None,
    cells: Tensor | None = None,
    update: str = "fresh",
    down: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """The backbone's last normed tokens (n, D) when all of them read the cells (l, m, D).

    `token` takes the place of the backbone's class token. Adapters are for every token.
    """
    x = embed(vit, image, token)
    n = len(x)
    patches = vit.config.grid[0] * vit.config.grid[1]
    nothing = x.new_zeros(0, x.shape[1])
    for layer in range(vit.config.depth):
        fresh = nothing
        if cells is not None:
            if update == "fresh":
                fresh = cells[layer]
            elif layer == 0:
                x = torch.cat([x, cells[0]])
            elif update == "add":
                x = torch.cat([x[:n], x[n:] + cells[layer]])
        allowed = torch.ones(len(x), len(x) + len(fresh), dtype=torch.bool)
        everyone = [] if down is None or up is None else [(range(len(x)), down, up)]
        x = layer_pass(vit, layer, x, fresh, nothing, allowed, everyone, n - patches)
    return layer_norm(vit, "norm", x[:n])
