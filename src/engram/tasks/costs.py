"""What a task costs: parameters, and multiply-accumulates (MACs) per image on top of the trunk.

Counted from shapes alone: matrix products, the patch embedding and attention; norms, softmax and
activations are left out, as is usual. A layer costs a token its projections and its MLP (12 D^2
where the MLP is 4 D wide) and 2 D for every key it reads. So, with 5 cells:

                      B/32                    B/16
    plain trunk       4,408 MMAC              17,563 MMAC
    masked task          86.0 (2.0 %)             88.7 (0.5 %)    one more token
    side task, r 16      10.1 (0.2 %)             52.0 (0.3 %)    16 numbers for every token
    memory                4.6                     18.2            every token reads 5 more keys

A `readout` costs no more than its head: 30,000 MACs a class for three moments of thirteen layers.
The paper's Table 5 has "about 25M FLOPs" for memory with 5 cells and does not say what it counted;
twice the MACs above would be 9.2 or 36.3. Where a pass needs less than all of the trunk's last
tokens, the code skips the rest; that saving is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engram.readout import squares_count
from engram.side import squares_seen
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec


@dataclass(frozen=True)
class Costs:
    """What a task adds to a trunk. MACs are those of one image, beyond one plain pass."""

    parameters: int  # without the head
    head_parameters: int
    macs: int  # without the head
    head_macs: int
    once: int  # MACs for what depends on no image, such as keys of cells: once a pass
    own_pass: bool  # shares no pass with base or other tasks, so a plain pass comes on top
    trunk_macs: int  # of the plain pass

    @property
    def share(self) -> float:
        """What the task adds, as a part of the plain pass."""
        return (self.macs + self.head_macs) / self.trunk_macs


def trunk_macs(trunk: TrunkShape, image_size: tuple[int, int] | None = None) -> int:
    """MACs of the plain trunk for one image, without its head."""
    rows, columns = _grid(trunk, image_size)
    embedding = rows * columns * 3 * trunk.patch**2 * trunk.width
    return embedding + _layers(trunk, rows * columns + trunk.prefix)


def task_costs(
    trunk: TrunkShape,
    spec: TaskSpec,
    ancestors: Sequence[TaskSpec] = (),
    image_size: tuple[int, int] | None = None,
) -> Costs:
    """What a task costs on top of the plain trunk, counted from shapes alone.

    Args:
        trunk: The shape of the trunk, such as the `trunk` of an engram.
        spec: The task.
        ancestors: All the tasks that it reads.
        image_size: Height and width of the images, if not the trunk's own.

    Returns:
        Parameters, and multiply-accumulates (MACs) per image.

    Examples:
        >>> what = engram.inspect("flowers.safetensors")
        >>> engram.tasks.costs.task_costs(what.trunk, what.spec).parameters
        5952
    """
    parts, (rows, columns) = spec.parts, _grid(trunk, image_size)
    n = rows * columns + trunk.prefix
    sizes = {name: math.prod(shape) for name, shape in spec.shapes(trunk).items()}
    head = sum(size for name, size in sizes.items() if name.startswith("head."))
    adapters = sum(size for name, size in sizes.items() if name.startswith("adapters."))
    if parts.side:
        macs, once = _side(trunk, spec, n)
    elif parts.masked:
        macs, once = _masked(trunk, spec, ancestors, n, adapters)
    else:
        macs, once = _through_trunk(trunk, spec, n, adapters)
    if parts.moments and spec.squares:
        macs += n * trunk.width * squares_count(trunk.depth)
    return Costs(
        parameters=sum(sizes.values()) - head + (trunk.parameters if parts.trunk else 0),
        head_parameters=head,
        macs=macs,
        head_macs=spec.does.head_macs(
            spec.features(trunk),
            len(spec.classes),
            rows * columns,
            mlp=parts.mlp,
            masked=parts.masked,
        ),
        once=once,
        own_pass=parts.changes_trunk,
        trunk_macs=trunk_macs(trunk, image_size),
    )


# MACs of an image, and those of a pass, for n tokens of the trunk


def _side(trunk: TrunkShape, spec: TaskSpec, n: int) -> tuple[int, int]:
    """Side patches: one step a layer, and one for the final tokens."""
    r, steps = spec.rank, trunk.depth + 1
    take_in, mlp, folded = n * trunk.width * r, 4 * n * r**2, 2 * r**3  # four maps into two
    if spec.side_form == 1:
        attention = 2 * n * (n + spec.cells + r) * r
    else:  # the mean is mapped to its key and value, and cells once
        attention = n * (1 + 2 * spec.cells) * r + 2 * r**2
        folded += 2 * spec.cells * r**2
    pool = n * (2 * spec.queries + squares_seen(spec.side_form, spec.queries)) * r
    parents = len(spec.extends) * n * r**2 * trunk.depth  # their first rows are zero
    return steps * (take_in + attention + mlp) + parents + pool, steps * folded


def _masked(
    trunk: TrunkShape, spec: TaskSpec, ancestors: Sequence[TaskSpec], n: int, adapters: int
) -> tuple[int, int]:
    """The task's own class tokens, which read the trunk and all that the task extends."""
    read = n + sum(task.tokens + task.cells for task in (spec, *ancestors))
    token = trunk.depth * (_token(trunk) + 2 * trunk.width * read) + adapters
    return spec.tokens * token, _keys_and_values(trunk, spec)


def _through_trunk(trunk: TrunkShape, spec: TaskSpec, n: int, adapters: int) -> tuple[int, int]:
    """What the trunk's own tokens do more than in a plain pass; nothing for a head or a readout."""
    parts = spec.parts
    cells = spec.cells if parts.cells else 0
    tokens, once = n + (parts.token and not trunk.class_token), 0
    if spec.update == "fresh":
        macs = _layers(trunk, tokens) + 2 * trunk.width * tokens * cells * trunk.depth
        once = _keys_and_values(trunk, spec)
    else:  # Figure 2b: the cells are tokens like the others
        tokens += cells
        macs = _layers(trunk, tokens)
    return macs + tokens * adapters - _layers(trunk, n), once


def _keys_and_values(trunk: TrunkShape, spec: TaskSpec) -> int:
    """Of the cells of all layers."""
    return 2 * spec.cells * trunk.width**2 * trunk.depth if spec.parts.cells else 0


def _grid(trunk: TrunkShape, image_size: tuple[int, int] | None) -> tuple[int, int]:
    height, width = image_size or trunk.image_size
    return height // trunk.patch, width // trunk.patch


def _token(trunk: TrunkShape) -> int:
    """What one layer costs one token, attention left out."""
    gates = 2 if trunk.activation == "swiglu" else 1
    return 4 * trunk.width**2 + (gates + 1) * trunk.width * trunk.mlp_width


def _layers(trunk: TrunkShape, tokens: int) -> int:
    """All layers, for tokens that all read each other."""
    return trunk.depth * (tokens * _token(trunk) + 2 * tokens**2 * trunk.width)
