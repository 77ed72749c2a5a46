"""What a task costs: parameters, and multiply-accumulates (MACs) per image on top of the trunk.

Counted from shapes alone: matrix products, the patch embedding and attention; norms, softmax and
activations are left out, as is usual. A layer costs a token its projections and its MLP (12 D^2
where the MLP is 4 D wide) and 2 D for every key it reads. So, with 5 cells:

                      B/32                    B/16
    plain trunk       4,408 MMAC              17,563 MMAC
    masked task          86.0 (2.0 %)             88.7 (0.5 %)    one more token
    memory                4.6                     18.2            every token reads 5 more keys

The paper's Table 5 has "about 25M FLOPs" for memory with 5 cells and does not say what it counted;
twice the MACs above would be 9.2 or 36.3. Where a pass needs less than all of the trunk's last
tokens, the code skips the rest; that saving is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec


@dataclass(frozen=True)
class Costs:
    """What a task adds to a trunk. MACs are those of one image, beyond one plain pass."""

    parameters: int  # without the head
    head_parameters: int
    macs: int  # without the head
    head_macs: int
    once: int  # MACs for the keys and values of the cells: once a pass, however many images
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
    parts, width, depth = spec.parts, trunk.width, trunk.depth
    rows, columns = _grid(trunk, image_size)
    n = rows * columns + trunk.prefix
    cells = spec.cells if parts.cells else 0
    sizes = {name: math.prod(shape) for name, shape in spec.shapes(trunk).items()}
    head = sum(size for name, size in sizes.items() if name.startswith("head."))
    adapters = sum(size for name, size in sizes.items() if name.startswith("adapters."))
    once = 2 * cells * width**2 * depth
    if parts.masked:
        read = n + sum(task.tokens + task.cells for task in (spec, *ancestors))
        macs = spec.tokens * (depth * (_token(trunk) + 2 * width * read) + adapters)
    else:
        tokens = n + (parts.token and not trunk.class_token)
        if spec.update == "fresh":
            macs = _layers(trunk, tokens) + 2 * width * tokens * cells * depth
        else:  # Figure 2b: the cells are tokens like the others
            tokens, once = tokens + cells, 0
            macs = _layers(trunk, tokens)
        macs += tokens * adapters - _layers(trunk, n)
    return Costs(
        parameters=sum(sizes.values()) - head + (trunk.parameters if parts.trunk else 0),
        head_parameters=head,
        macs=macs,
        head_macs=spec.does.head_macs(
            width, len(spec.classes), rows * columns, mlp=parts.mlp, masked=parts.masked
        ),
        once=once,
        own_pass=parts.changes_trunk,
        trunk_macs=trunk_macs(trunk, image_size),
    )


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
