"""Accuracy of int8 on photographs, and that an answer does not depend on its batch.

    python -m benchmarks.serve.int8 pets.safetensors ../shared/data/pets/test

The engrams, all of tasks with the classes of the folder, run in PyTorch and in the service's engine
`onnx-int8` on the photographs of a folder with one subfolder per class: in batches of 16 in two
random orders, and some of them alone. It prints its figures; docs/export.md quotes them. A few
minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from engram.export.onnx_engine import OnnxEngine
from engram.export.runtime import RUNTIMES
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.engine import Engine, TorchEngine, load_model

BATCH = 16
Logits = dict[str, Tensor]  # by task


def run_in_order(engine: Engine, pixels: Tensor, order: Tensor, names: list[str]) -> Logits:
    """Run the images in batches in this order; the logits come in the images' own order."""
    parts = [engine.run(pixels[rows], names) for rows in torch.split(order, BATCH)]
    back = order.argsort()
    return {name: torch.cat([part[name] for part in parts])[back] for name in names}


def print_differences(one: Logits, other: Logits) -> None:
    for name, logits in one.items():
        best = logits.argmax(-1, keepdim=True)
        same = float((best == other[name].argmax(-1, keepdim=True)).float().mean())
        moved = (logits.softmax(-1) - other[name].softmax(-1)).gather(-1, best).abs()
        error = float((logits - other[name]).norm() / logits.norm())
        print(
            f"{name}: the top class is the same for {same:.1%}; its probability differs by "
            f"{float(moved.median()):.3f} in the median, by {float(moved.max()):.3f} at most; the "
            f"logits by {error:.1%} of their norm"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.int8", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("engrams", type=Path, nargs="+", help="files of the engrams")
    parser.add_argument("photographs", type=Path, help="folder with one subfolder per class")
    parser.add_argument("--backbone", help="path or Hub id of the backbone")
    parser.add_argument("--every", type=int, default=1, help="take every nth photograph")
    given = parser.parse_args()
    model = load_model(given.engrams, given.backbone).eval()
    int8 = OnnxEngine(model, RUNTIMES["onnx-int8"])
    paths = sorted(path for path in given.photographs.rglob("*") if path.is_file())[:: given.every]
    views = [torch.from_numpy(evaluation_view(path, model.preprocessing)) for path in paths]
    pixels = normalise(torch.stack(views), model.preprocessing)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randperm(len(pixels), generator=generator) for _ in range(2))
    found = run_in_order(int8, pixels, first, int8.names)
    other = run_in_order(int8, pixels, second, int8.names)
    alone = int8.run(pixels[:1], int8.names)
    same = all(torch.equal(found[n], other[n]) for n in found) and all(
        torch.equal(alone[n][0], found[n][0]) for n in found
    )
    print(f"two orders of {len(pixels)} images, and one alone: {'same bits' if same else 'DIFFER'}")
    expected = run_in_order(TorchEngine(model), pixels, first, int8.names)
    for name, task in model.tasks.items():
        labels = torch.tensor([task.spec.classes.index(path.parent.name) for path in paths])
        for what, logits in {"fp32": expected, "int8": found}.items():
            accuracy = float((logits[name].argmax(-1) == labels).float().mean())
            print(f"{name}, {what}: accuracy {accuracy:.1%} on {len(pixels)} images")
    print_differences(expected, found)


if __name__ == "__main__":
    main()
