"""What tasks cost: forward with many tasks, and one training step, beside the plain trunk.

    python benchmarks/bench_method.py

Takes about four minutes on two idle cores. Every time is a ratio to the plain trunk's forward for
the same images in the same run. Targets: 1.25, 1.28 and 2.9 forward; 1.25 for a training step,
whose memory is at most a fifth of the same step with gradients through the trunk. Memory is what a
process of its own grows by in its first step.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F

from engram import MemoryViT
from engram.costs import shape_of, trunk_macs
from timing import compare, report, vit_b32

TARGETS = {("10 tasks", 16): "1.25", ("10 tasks", 1): "1.28", ("100 tasks", 16): "2.9"}
torch.set_num_threads(2)
trunk = vit_b32()


def with_tasks(count: int, regime: str = "masked") -> MemoryViT:
    model = MemoryViT(trunk)
    for i in range(count):
        model.add_task(f"task{i}", classes=10, cells=5, regime=regime)
    return model.eval()


one = with_tasks(1)
images, labels = torch.randn(16, 3, 224, 224), torch.randint(0, 10, (16,))
optimizer = torch.optim.SGD(one.task("task0").parameters(), lr=0.01, momentum=0.9)


def step(through_trunk: bool = False) -> None:
    """Forward, backward, update; `through_trunk` makes autograd keep the trunk's activations."""
    inputs = images.clone().requires_grad_(through_trunk)
    loss = F.cross_entropy(one(inputs, tasks=["task0"])["task0"], labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def plain() -> None:
    with torch.inference_mode():
        trunk(images)


def growth(which: str) -> int:
    """Bytes that a new process grows by in its first step."""
    command = [sys.executable, __file__, "--memory", which]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def forward_lines() -> list[str]:
    ten, hundred = with_tasks(10), with_tasks(100)
    adapted = with_tasks(10, "masked+adapter")
    token = 12 * trunk.config.depth * trunk.config.width**2
    whole = trunk_macs(shape_of(trunk))
    lines = [
        "| forward | batch | ratio | quartiles | by FLOPs | target |",
        "|---|---|---|---|---|---|",
    ]
    for batch, rounds in ((16, 9), (1, 25)):
        pixels = torch.randn(batch, 3, 224, 224)
        functions = {
            "plain trunk": partial(trunk, pixels),
            "1 task": partial(one, pixels),
            "10 tasks": partial(ten, pixels),
            "100 tasks": partial(hundred, pixels),
            "10 tasks, exact": partial(ten, pixels, exact=True),
            "10 tasks with adapters": partial(adapted, pixels),
        }
        with torch.inference_mode():
            found = compare(functions, rounds)
        for name, timing in found.items():
            count = {"plain trunk": 0, "1 task": 1, "100 tasks": 100}.get(name, 10)
            lines.append(
                f"| {name} | {batch} | {timing.ratio:.3f} | {timing.low:.3f} to {timing.high:.3f} "
                f"| {1 + count * token / whole:.2f} | {TARGETS.get((name, batch), '')} |"
            )
    return lines


def step_lines() -> list[str]:
    found = compare({"plain": plain, "masked": step, "through": partial(step, True)}, 8)
    memory = {name: growth(name) for name in ("masked", "through")}
    lines = [
        "| a training step of one masked task, batch 16 | ratio | quartiles | peak memory |",
        "|---|---|---|---|",
    ]
    for name, words in (("masked", "beside the trunk"), ("through", "through the trunk")):
        timing = found[name]
        lines.append(
            f"| {words} | {timing.ratio:.3f} | {timing.low:.3f} to {timing.high:.3f} "
            f"| {memory[name] / 1e6:.0f} MB |"
        )
    share = memory["masked"] / memory["through"]
    return [*lines, "", f"Targets: 1.25 in time; 0.20 of the memory, which is {share:.2f}."]


if sys.argv[1:2] == ["--memory"]:
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak of starting up
    before = psutil.Process().memory_info().rss
    step(sys.argv[2] == "through")
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) * 1024 - before)
else:
    title = "What tasks cost beside the plain trunk (ViT-B/32, 5 cells a task)"
    report("method", title, [*forward_lines(), "", *step_lines()])
