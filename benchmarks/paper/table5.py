"""Table 5: parameters and operations of every regime, counted from shapes and measured.

    python benchmarks/paper/table5.py

Counted for the paper's B/32 and for the Ti/16 of the other tables (100 classes, 224 pixels), by
`engram.costs`. Measured on the Ti/16: operations by torch's counter, time as a ratio to the plain
trunk, in turns within one run, 8 images, median of nine rounds. A minute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from runs import RECORDS, read, write
from show import markdown
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engram.experiments.timing import Case, compare
from engram.model import MemoryViT
from engram.tasks.costs import task_costs, trunk_macs
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec, class_names
from engram.vit import HeadConfig, ViT, ViTConfig

REGIMES = ("full", "head", "class", "memory", "masked", "masked+adapter", "adapter",
           "memory+adapter")  # fmt: skip
TI16 = ViTConfig((224, 224), 16, 192, 12, 3, 768, head=HeadConfig(1000))
B32 = ViTConfig((224, 224), 32, 768, 12, 12, 3072, head=HeadConfig(1000))
PATH, CLASSES, IMAGES = RECORDS / "costs.json", 100, 8


def measure() -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    trunk, pixels = ViT(TI16).eval(), torch.randn(IMAGES, 3, 224, 224)
    functions: dict[str, Callable[..., object]] = {
        "trunk": lambda exact=False: trunk.tokens(pixels)
    }
    for regime in REGIMES:
        model = MemoryViT(trunk)
        model.add_task("task", CLASSES, 5, regime=regime, seed=0)
        model.eval()
        functions[regime] = lambda exact=False, model=model: model(pixels, ["task"], exact)
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        cases = {name: Case(function) for name, function in functions.items()}
        timings = compare(cases, seconds=0, least=9)
        for name, function in functions.items():
            # `exact` runs the whole trunk; the fast way, its last layer makes what is asked for.
            # Fused attention is not counted on a CPU, so it is taken apart.
            function(exact=True)
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                function(exact=True)
            found[name] = {
                "macs": counter.get_total_flops() / 2 / IMAGES,
                "time": round(timings[name].ratio, 3),
                "low": round(timings[name].low, 3),
                "high": round(timings[name].high, 3),
            }
    return found


def table() -> list[str]:
    measured = read(PATH)
    if measured is None:
        return ["Not measured."]
    rows = []
    tiny, base = TrunkShape.of(TI16), TrunkShape.of(B32)
    plain = f"{trunk_macs(tiny) / 1e6:,.1f}"
    for regime in REGIMES:
        spec = TaskSpec("task", class_names(CLASSES), regime=regime)
        b, t, m = task_costs(base, spec), task_costs(tiny, spec), measured[regime]
        more = m["macs"] - measured["trunk"]["macs"]
        rows.append([
            f"`{regime}`",
            f"{b.parameters:,}",
            f"{b.macs / 1e6:,.1f}",
            f"{t.parameters:,}",
            f"{t.macs / 1e6:,.1f}",
            f"{more / 1e6:,.1f}",
            f"{m['time']:.2f} ({m['low']:.2f}–{m['high']:.2f})",
        ])  # fmt: skip
    head = ("regime, 5 cells", "B/32: parameters", "B/32: MMAC more", "Ti/16: parameters",
            f"Ti/16: MMAC more than {plain}", "counted by torch",
            "time, as a multiple of the trunk's pass")  # fmt: skip
    return markdown(head, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(PATH, measure())
    print("\n".join(table()))
