"""Accuracy of int8 and bf16 on photographs, and that an answer does not depend on its batch.

    python -m benchmarks.serve.rounding pets.safetensors ../shared/data/pets/test

The engrams, all of tasks with the classes of the folder, run in PyTorch and in the engines that
round (`onnx-int8`, `openvino`, `openvino-int8`) on the photographs of a folder with one subfolder
per class: in batches of 16 in two random orders, and one of them alone. It prints its figures;
docs/export.md and docs/serve.md quote them. A few minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engram.export.onnx_engine import OnnxEngine
from engram.export.runtime import RUNTIMES
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.engine import Engine, TorchEngine, load_model
from engram.model import MemoryViT

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
        prog="python -m benchmarks.serve.rounding", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("engrams", type=Path, nargs="+", help="files of the engrams")
    parser.add_argument("photographs", type=Path, help="folder with one subfolder per class")
    parser.add_argument("--backbone", help="path or Hub id of the backbone")
    parser.add_argument("--every", type=int, default=1, help="take every nth photograph")
    given = parser.parse_args()
    model = load_model(given.engrams, given.backbone).eval()
    paths = sorted(path for path in given.photographs.rglob("*") if path.is_file())[:: given.every]
    views = [torch.from_numpy(evaluation_view(path, model.preprocessing)) for path in paths]
    pixels = normalise(torch.stack(views), model.preprocessing)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randperm(len(pixels), generator=generator) for _ in range(2))
    names = list(model.output_names())
    expected = run_in_order(TorchEngine(model), pixels, first, names)
    _print_accuracy(model, paths, "torch", expected)
    for kind, runtime in RUNTIMES.items():
        if not runtime.rounds:
            continue
        engine = OnnxEngine(model, runtime)
        found = run_in_order(engine, pixels, first, names)
        other = run_in_order(engine, pixels, second, names)
        alone = engine.run(pixels[:1], names)
        same = all(
            torch.equal(found[n], other[n]) and torch.equal(alone[n][0], found[n][0]) for n in names
        )
        what = "same bits" if same else "DIFFER"
        print(f"{kind}: two orders of {len(pixels)} images, and one alone: {what}")
        _print_accuracy(model, paths, kind, found)
        print_differences(expected, found)


def _print_accuracy(model: MemoryViT, paths: Sequence[Path], kind: str, logits: Logits) -> None:
    for name, task in model.tasks.items():
        labels = torch.tensor([task.spec.classes.index(path.parent.name) for path in paths])
        accuracy = float((logits[name].argmax(-1) == labels).float().mean())
        print(f"{kind}: {name}: accuracy {accuracy:.1%} on {len(paths)} images")


if __name__ == "__main__":
    main()
