"""What one run measures: shapes, counts and how long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engram.backbones.random import backbone_of_shape, random_backbone
from engram.experiments.bench import Workload
from engram.vit import ViT


@dataclass(frozen=True)
class Plan:
    """The defaults are what `make bench` runs: about 45 minutes on two cores."""

    name: str = "full"
    big: str = "ViT-B/32"
    small: str = "ViT-Ti/16"
    tasks: tuple[int, ...] = (1, 10, 100)
    batches: tuple[int, ...] = (16, 1)
    side_tasks: tuple[int, ...] = (10, 100, 1000)
    readouts: tuple[int, ...] = (1000,)
    routed: int = 100  # tasks of which every image is asked for one
    side_batch: int = 16
    photographs: int = 2000  # that `engram fit` gets
    real: bool = (
        True  # of the assets folder, with its backbone; else drawn, for a very small backbone
    )
    step_batch: int = 16
    cached_batch: int = 128
    sweep_batch: int = 64
    variants: int = 16
    middle: int = 10  # number of tasks while something else grows
    growth_batch: int = 8
    growth_tasks: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200)
    growth_images: tuple[int, ...] = (1, 4, 16, 64, 256)
    growth_cells: tuple[int, ...] = (0, 1, 2, 5, 10, 20, 50)
    growth_backbones: tuple[str, ...] = ("ViT-Ti/16", "ViT-S/16", "ViT-B/16")
    busy_rounds: int = 7
    busy_runs: int = 2  # of each row in a round
    busy_images: int = 200  # from which heads are solved
    busy_seconds: float = 4.0  # that clients ask the service
    memory_tasks: int = 100
    memory_images: int = 400
    starts: int = 15  # of each command
    haste: float = 1.0  # divides the seconds that every table may take
    least: int = 5  # minimum number of rounds
    peaks: tuple[str, ...] = field(default=())  # steps whose memory is measured; empty: all

    def rounds(self, count: int) -> int:
        return max(1, round(count / self.haste))

    def workload(self, backbone: ViT, seconds: float, least: int | None = None) -> Workload:
        rounds = min(least or self.least, self.least)
        return Workload(backbone, seconds=seconds / self.haste, least=rounds, passes=2)


FULL = Plan()
QUICK = replace(
    FULL,
    name="quick",
    big="ViT-Ti/32",
    small="ViT-Ti/32",
    growth_backbones=("ViT-Ti/32", "ViT-S/32", "ViT-B/32"),
    side_tasks=(10, 100),
    readouts=(100,),
    photographs=60,
    real=False,
    cached_batch=32,
    sweep_batch=16,
    growth_batch=2,
    growth_images=(1, 4, 16, 64),
    busy_runs=1,
    busy_images=40,
    busy_seconds=1.0,
    memory_images=40,
    haste=1000,
    least=2,
)
TINY = Plan(
    name="tiny",
    big="random-32",
    small="random-16",
    tasks=(1, 2, 5),
    batches=(2, 1),
    side_tasks=(1, 3),
    readouts=(3,),
    routed=3,
    side_batch=2,
    photographs=20,
    real=False,
    step_batch=2,
    cached_batch=4,
    sweep_batch=2,
    variants=3,
    middle=2,
    growth_batch=1,
    growth_tasks=(1, 2, 4),
    growth_images=(1, 2, 4),
    growth_cells=(0, 1, 2),
    growth_backbones=("random-16", "random-32", "random-64"),
    busy_runs=1,
    busy_images=20,
    busy_seconds=0.1,
    memory_tasks=3,
    memory_images=20,
    haste=1000,
    least=1,
    peaks=("engram", "engram, gradients through the backbone"),
)
PLANS = {plan.name: plan for plan in (FULL, QUICK, TINY)}


def backbone_of(name: str) -> ViT:
    """A backbone of a standard architecture, or `random-WIDTH` for a very small one."""
    if name.startswith("random-"):
        return random_backbone(image_size=16, depth=2, heads=2, width=int(name[7:]))
    return backbone_of_shape(name)
