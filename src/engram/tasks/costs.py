"""Costs of a task: parameters, and multiply-accumulates (MACs) per image on top of the backbone.

Counted from shapes alone (methods/method.py); docs/explanation.md has the numbers of two backbones.
Where a pass needs less than all of the backbone's last tokens, the code skips the rest; that saving
is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engram.backbones.shape import BackboneShape
from engram.methods.method import layers_macs
from engram.tasks.spec import TaskSpec


@dataclass(frozen=True)
class Costs:
    """Costs that a task adds to a backbone. MACs are those of one image, beyond one plain pass."""

    parameters: int  # without the head
    head_parameters: int
    macs: int  # without the head
    head_macs: int
    once: int  # MACs for what depends on no image, such as keys of cells: once a pass
    own_pass: bool  # shares no pass with base or other tasks, so a plain pass comes on top
    backbone_macs: int  # of the plain pass

    @property
    def share(self) -> float:
        """The task's MACs as a share of the plain pass."""
        return (self.macs + self.head_macs) / self.backbone_macs


def backbone_macs(backbone: BackboneShape, image_size: tuple[int, int] | None = None) -> int:
    """MACs of the plain backbone for one image, without its head."""
    rows, columns = _grid(backbone, image_size)
    embedding = rows * columns * 3 * backbone.patch**2 * backbone.width
    return embedding + layers_macs(backbone, rows * columns + backbone.prefix)


def task_costs(
    backbone: BackboneShape,
    spec: TaskSpec,
    ancestors: Sequence[TaskSpec] = (),
    image_size: tuple[int, int] | None = None,
) -> Costs:
    """Count the costs of a task on top of the plain backbone, from shapes alone.

    Args:
        backbone: The shape of the backbone, such as the `backbone` of an engram.
        spec: The task.
        ancestors: All the tasks that it reads.
        image_size: Height and width of the images, if not the backbone's own.

    Returns:
        Parameters, and multiply-accumulates (MACs) per image.

    Examples:
        >>> what = engram.inspect("flowers.safetensors")
        >>> engram.tasks.costs.task_costs(what.backbone, what.spec).parameters
        5952
    """
    spec = spec.fitted(backbone)
    method, (rows, columns) = spec.method, _grid(backbone, image_size)
    shape, n = spec.shape(backbone), rows * columns + backbone.prefix
    sizes = {name: math.prod(shape) for name, shape in spec.shapes(backbone).items()}
    head = sum(size for name, size in sizes.items() if name.startswith("head."))
    macs, once = method.macs(shape, n, [one.fitted(backbone).method for one in ancestors])
    return Costs(
        parameters=sum(sizes.values()) - head + method.backbone_parameters(backbone),
        head_parameters=head,
        macs=macs,
        head_macs=spec.kind_object.head_macs(spec.head_config(backbone), rows * columns),
        once=once,
        own_pass=not method.shares_pass,
        backbone_macs=backbone_macs(backbone, image_size),
    )


def _grid(backbone: BackboneShape, image_size: tuple[int, int] | None) -> tuple[int, int]:
    height, width = image_size or backbone.image_size
    return height // backbone.patch, width // backbone.patch
