"""What tasks cost: forward with many tasks, and one training step, beside the plain trunk.

    python benchmarks/bench_method.py

Takes about five minutes on two cores. Every number is a ratio to the plain trunk's forward for the
same images in the same run. Targets: 1.25, 1.28 and 2.9 forward; 1.25 for a training step, whose
memory is at most a fifth of the same step with gradients through the trunk.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from engram import MemoryViT
from engram.costs import shape_of, trunk_macs
from timing import compare, peak_memory, report, vit_b32

torch.set_num_threads(2)
trunk = vit_b32()


def with_tasks(count: int, regime: str = "masked") -> MemoryViT:
    model = MemoryViT(trunk)
    for i in range(count):
        model.add_task(f"task{i}", classes=10, cells=5, regime=regime)
    return model.eval()


one, ten, hundred = with_tasks(1), with_tasks(10), with_tasks(100)
adapted = with_tasks(10, "masked+adapter")
token = 12 * trunk.config.depth * trunk.config.width**2
whole = trunk_macs(shape_of(trunk))
lines = [
    "| forward | batch | ratio | quartiles | by FLOPs | target |",
    "|---|---|---|---|---|---|",
]
for batch, rounds in ((16, 15), (1, 40)):
    pixels = torch.randn(batch, 3, 224, 224)
    functions = {
        "plain trunk": partial(trunk, pixels),
        "1 task": partial(one, pixels),
        "10 tasks": partial(ten, pixels),
        "100 tasks": partial(hundred, pixels),
        "10 tasks, exact": partial(ten, pixels, exact=True),
        "10 tasks with adapters": partial(adapted, pixels),
    }
    targets = {("10 tasks", 16): "1.25", ("10 tasks", 1): "1.28", ("100 tasks", 16): "2.9"}
    with torch.inference_mode():
        found = compare(functions, rounds)
    for name, timing in found.items():
        count = {"1 task": 1, "100 tasks": 100, "plain trunk": 0}.get(name, 10)
        flops = 1 + count * token / whole
        lines.append(
            f"| {name} | {batch} | {timing.ratio:.3f} | {timing.low:.3f} to {timing.high:.3f} "
            f"| {flops:.2f} | {targets.get((name, batch), '')} |"
        )

# One training step of one masked task, and the same with gradients through the trunk
pixels, labels = torch.randn(16, 3, 224, 224), torch.randint(0, 10, (16,))
optimizer = torch.optim.SGD(one.task("task0").parameters(), lr=0.01, momentum=0.9)


def step(through_trunk: bool = False) -> None:
    """Forward, backward, update; `through_trunk` makes autograd keep the trunk's activations."""
    inputs = pixels.clone().requires_grad_(through_trunk)
    loss = F.cross_entropy(one(inputs, tasks=["task0"])["task0"], labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def plain() -> None:
    with torch.inference_mode():
        trunk(pixels)


found = compare({"plain": plain, "masked": step, "through": partial(step, True)}, 12)
memory = {name: peak_memory(f) for name, f in (("masked", step), ("through", partial(step, True)))}
lines += [
    "",
    "| a training step of one masked task, batch 16 | ratio | quartiles | peak memory |",
    "|---|---|---|---|",
]
for name, words in (("masked", "the trunk runs without a graph"), ("through", "through the trunk")):
    timing = found[name]
    lines.append(
        f"| {words} | {timing.ratio:.3f} | {timing.low:.3f} to {timing.high:.3f} "
        f"| {memory[name] / 1e6:.0f} MB |"
    )
share = memory["masked"] / memory["through"]
lines += [
    "",
    f"Memory: {share:.2f} of the step through the trunk (target 0.20); time: target 1.25.",
]
report("method", "What tasks cost beside the plain trunk (ViT-B/32, 5 cells a task)", lines)
