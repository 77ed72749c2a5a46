"""Table 5: parameters and operations of every regime, counted from shapes and measured.

Counted for the paper's B/32 and for the Ti/16 of the other tables (100 classes, 224 pixels) by
`engram.tasks.costs`. Measured on the Ti/16: operations by torch's counter, and time relative to the
plain backbone in the same run, with 8 images, as the median of nine rounds. A minute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.paper.records import COSTS, Record
from benchmarks.report import markdown_table
from engram.backbones.shape import BackboneShape
from engram.experiments.timing import Case, compare
from engram.methods import METHODS
from engram.model import MemoryViT
from engram.tasks.costs import Costs, backbone_macs, task_costs
from engram.tasks.spec import TaskSpec, class_names
from engram.vit.vit import HeadConfig, ViT, ViTConfig

REGIMES = ("full", "head", "class", "memory", "masked", "masked+adapter", "adapter",
           "memory+adapter")  # fmt: skip
BACKBONE = "backbone"  # the record of the plain backbone
TI16 = ViTConfig((224, 224), 16, 192, 12, 3, 768, head=HeadConfig(1000))
B32 = ViTConfig((224, 224), 32, 768, 12, 12, 3072, head=HeadConfig(1000))
CLASSES, IMAGES = 100, 8


@dataclass(frozen=True)
class CostMeasurement:
    """Operations and time of all regimes; they are measured in one run, so that they compare."""

    name: str = "costs"

    def missing(self) -> bool:
        return any(name not in COSTS for name in (BACKBONE, *REGIMES))

    def ready(self) -> bool:
        return True

    def work(self, say: Callable[[str], object]) -> None:
        for name, record in measure().items():
            COSTS.append(name, record)
            say(f"{name}: {record['time']:.2f}")


@torch.inference_mode()
def measure() -> dict[str, Record]:
    passes = _passes()
    cases = {name: Case(function) for name, function in passes.items()}
    timings = compare(cases, seconds=0, least=9)
    return {
        name: {
            "macs": _counted_macs(function),
            "time": round(timings[name].ratio, 3),
            "low": round(timings[name].low, 3),
            "high": round(timings[name].high, 3),
        }
        for name, function in passes.items()
    }


def _passes() -> dict[str, Callable[..., object]]:
    """A forward pass of the plain backbone and of every regime."""
    torch.manual_seed(0)
    backbone, pixels = ViT(TI16).eval(), torch.randn(IMAGES, 3, 224, 224)
    passes: dict[str, Callable[..., object]] = {
        BACKBONE: lambda exact=False: backbone.tokens(pixels)
    }
    for regime in REGIMES:
        model = MemoryViT(backbone)
        model.add_task("task", CLASSES, regime=regime, seed=0)
        model.eval()
        passes[regime] = lambda exact=False, model=model: model(pixels, ["task"], exact)
    return passes


def _counted_macs(function: Callable[..., object]) -> float:
    """Multiply-accumulates per image, by torch's counter.

    `exact` runs the whole backbone, while the fast path computes only the needed part of its last
    layer. Fused attention is not counted on a CPU, so the plain implementation is used.
    """
    function(exact=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function(exact=True)
    return float(counter.get_total_flops()) / 2 / IMAGES


def table() -> list[str]:
    if CostMeasurement().missing():
        return ["Not measured."]
    tiny, base = BackboneShape.measure(TI16), BackboneShape.measure(B32)
    backbone = COSTS.get(BACKBONE) or {}
    rows = []
    for regime in REGIMES:
        spec = TaskSpec("task", class_names(CLASSES), method=METHODS[regime]())
        measured = COSTS.get(regime) or {}
        rows.append([
            f"`{regime}`",
            *_counted(task_costs(base, spec)),
            *_counted(task_costs(tiny, spec)),
            f"{(measured['macs'] - backbone['macs']) / 1e6:,.1f}",
            _time(measured),
        ])  # fmt: skip
    head = ("regime, 5 cells", "B/32: parameters", "B/32: extra MMAC", "Ti/16: parameters",
            f"Ti/16: MMAC in addition to {backbone_macs(tiny) / 1e6:,.1f}", "counted by torch",
            "time, relative to the backbone's pass")  # fmt: skip
    return markdown_table(head, rows)


def _counted(costs: Costs) -> tuple[str, str]:
    return f"{costs.parameters:,}", f"{costs.macs / 1e6:,.1f}"


def _time(measured: Mapping[str, float]) -> str:
    return f"{measured['time']:.2f} ({measured['low']:.2f}–{measured['high']:.2f})"
