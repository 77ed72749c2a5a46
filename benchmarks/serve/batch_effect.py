"""How much an int8 answer depends on the other images of its batch, compared with rounding itself.

    python -m benchmarks.serve.batch_effect pets.safetensors ../shared/data/pets/test

The engram is exported with int8 (or read from `--graph FILE`) and run on every fifth photograph of
a folder with one subfolder per class: alone, and in batches of 16 in two random orders. It prints
its figures; docs/export.md and docs/serve.md quote them. A few minutes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from engram.export import OnnxModel, export_onnx
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.load import load_model
from engram.model import MemoryViT

BATCH = 16
Logits = dict[str, Tensor]  # by task


def run_in_order(engine: OnnxModel, pixels: Tensor, order: Tensor, batch: int) -> Logits:
    """Run the images in batches in this order; the logits come in the images' own order."""
    parts = [engine.run(pixels[rows]) for rows in torch.split(order, batch)]
    back = order.argsort()
    return {name: torch.cat([part[name] for part in parts])[back] for name in engine.tasks}


def run_torch(model: MemoryViT, pixels: Tensor, tasks: list[str]) -> Logits:
    with torch.inference_mode():
        parts = [model(part, tasks) for part in torch.split(pixels, BATCH)]
    return {name: torch.cat([part[name] for part in parts]) for name in tasks}


def print_differences(what: str, one: Logits, other: Logits) -> None:
    for name, logits in one.items():
        best = logits.argmax(-1, keepdim=True)
        same = float((best == other[name].argmax(-1, keepdim=True)).float().mean())
        moved = (logits.softmax(-1) - other[name].softmax(-1)).gather(-1, best).abs()
        print(
            f"{what}, {name}: the top class is the same for {same:.1%}; its probability differs by "
            f"{float(moved.median()):.3f} in the median, by {float(moved.max()):.3f} at most"
        )


def compare_answers(model: MemoryViT, engine: OnnxModel, pixels: Tensor, labels: Tensor) -> None:
    (task,) = model.tasks
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randperm(len(pixels), generator=generator) for _ in range(2))
    found = {
        "fp32": run_torch(model, pixels, list(engine.tasks)),
        "int8, one at a time": run_in_order(engine, pixels, torch.arange(len(pixels)), 1),
        f"int8, batch {BATCH}, first order": run_in_order(engine, pixels, first, BATCH),
        f"int8, batch {BATCH}, second order": run_in_order(engine, pixels, second, BATCH),
    }
    for what, logits in found.items():
        accuracy = float((logits[task].argmax(-1) == labels).float().mean())
        print(f"{what}: accuracy {accuracy:.1%} on {len(pixels)} images")
    names = list(found)
    for one, other in itertools.pairwise(names):
        print_differences(f"{one} and {other}", found[one], found[other])


def compare_times(engine: OnnxModel, pixels: Tensor) -> None:
    seconds: dict[int, list[float]] = {1: [], BATCH: []}
    for _ in range(7):
        for batch, times in seconds.items():
            began = time.perf_counter()
            run_in_order(engine, pixels[:BATCH], torch.arange(BATCH), batch)
            times.append(time.perf_counter() - began)
    ratio = statistics.median(a / b for a, b in zip(seconds[1], seconds[BATCH], strict=True))
    print(f"{BATCH} images one at a time take {ratio:.2f} times the time of one batch")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.batch_effect", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("engram", type=Path, help="file of the engram")
    parser.add_argument("photographs", type=Path, help="folder with one subfolder per class")
    parser.add_argument("--backbone", help="path or Hub id of the backbone")
    parser.add_argument("--graph", type=Path, help="int8 graph that was exported before")
    given = parser.parse_args()
    model = load_model([given.engram], given.backbone).eval()
    (task,) = model.tasks.values()
    with tempfile.TemporaryDirectory() as folder:
        path = given.graph or export_onnx(model, Path(folder) / "model.onnx", int8=True).path
        engine = OnnxModel(path)
    photographs = sorted(path for path in given.photographs.rglob("*") if path.is_file())[::5]
    preprocessing = model.preprocessing
    views = [torch.from_numpy(evaluation_view(path, preprocessing)) for path in photographs]
    pixels = normalise(torch.stack(views), preprocessing)
    labels = torch.tensor([task.spec.classes.index(path.parent.name) for path in photographs])
    compare_answers(model, engine, pixels, labels)
    compare_times(engine, pixels)


if __name__ == "__main__":
    main()
