"""What a task costs: parameters, and multiply-accumulates (MACs) per image on top of the backbone.

Counted from shapes alone (methods/method.py). So, with 5 cells:

                      B/32                    B/16
    plain backbone       4,408 MMAC              17,563 MMAC
    masked task          86.0 (2.0 %)             88.7 (0.5 %)    one more token
    side task, r 16       8.8 (0.2 %)             34.7 (0.2 %)    16 numbers for every token
    memory                4.6                     18.2            every token reads 5 more keys

A `readout` costs no more than its head: 30,000 MACs a class for all layers of a B/32.
The paper's Table 5 has "about 25M FLOPs" for memory with 5 cells and does not say what it counted;
twice the MACs above would be 9.2 or 36.3. Where a pass needs less than all of the backbone's last
tokens, the code skips the rest; that saving is not counted.
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
    """What a task adds to a backbone. MACs are those of one image, beyond one plain pass."""

    parameters: int  # without the head
    head_parameters: int
    macs: int  # without the head
    head_macs: int
    once: int  # MACs for what depends on no image, such as keys of cells: once a pass
    own_pass: bool  # shares no pass with base or other tasks, so a plain pass comes on top
    backbone_macs: int  # of the plain pass

    @property
    def share(self) -> float:
        """What the task adds, as a part of the plain pass."""
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
    """What a task costs on top of the plain backbone, counted from shapes alone.

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
