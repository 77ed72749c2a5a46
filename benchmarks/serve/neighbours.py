"""How much an int8 answer depends on the other images of its batch, beside the rounding itself.

    python benchmarks/serve/neighbours.py pets.safetensors ../shared/data/pets/test

The engram is exported with int8 (or `--graph FILE` was, before) and asked about every fifth
photograph, a folder for each class: alone, and in batches of 16 in two random orders.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from engram.export.write import OnnxModel, export_onnx
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.evaluate import preprocessing_of
from engram.inference.load import load_model

BATCH = 16


def asked(engine: OnnxModel, pixels: Tensor, order: Tensor, batch: int) -> dict[str, Tensor]:
    """Logits by task, in the pictures' own order."""
    parts = [engine.run(pixels[rows]) for rows in torch.split(order, batch)]
    back = order.argsort()
    return {name: torch.cat([part[name] for part in parts])[back] for name in engine.tasks}


def told(what: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, logits in one.items():
        best = logits.argmax(-1, keepdim=True)
        same = float((best == other[name].argmax(-1, keepdim=True)).float().mean())
        moved = (logits.softmax(-1) - other[name].softmax(-1)).gather(-1, best).abs()
        print(
            f"{what}, {name}: the same best class for {same:.1%}; its probability moved by "
            f"{float(moved.median()):.3f} in the median, {float(moved.max()):.3f} at most"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("engram", type=Path)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--backbone", help="where the trunk lies")
    parser.add_argument("--graph", type=Path, help="exported before")
    given = parser.parse_args()
    model = load_model([given.engram], given.backbone).eval()
    (task,) = model.tasks.values()
    with tempfile.TemporaryDirectory() as folder:
        path = given.graph or export_onnx(model, Path(folder) / "model.onnx", int8=True).path
        engine = OnnxModel(path)
    photographs = sorted(path for path in given.photographs.rglob("*") if path.is_file())[::5]
    preprocessing = preprocessing_of(model)
    views = [torch.from_numpy(evaluation_view(path, preprocessing)) for path in photographs]
    pixels = normalise(torch.stack(views), preprocessing)
    labels = torch.tensor([task.spec.classes.index(path.parent.name) for path in photographs])
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randperm(len(pixels), generator=generator) for _ in range(2))
    with torch.inference_mode():
        parts = [model(part, list(engine.tasks)) for part in torch.split(pixels, BATCH)]
    found = {
        "floats": {name: torch.cat([part[name] for part in parts]) for name in engine.tasks},
        "int8, alone": asked(engine, pixels, torch.arange(len(pixels)), 1),
        "int8, 16 in one order": asked(engine, pixels, first, BATCH),
        "int8, 16 in another": asked(engine, pixels, second, BATCH),
    }
    for what, logits in found.items():
        right = float((logits[task.spec.name].argmax(-1) == labels).float().mean())
        print(f"{what}: {right:.1%} of {len(pixels)} right")
    names = list(found)
    for a, b in ((0, 1), (1, 2), (2, 3)):
        told(f"{names[a]} and {names[b]}", found[names[a]], found[names[b]])
    seconds: dict[int, list[float]] = {1: [], BATCH: []}
    for _ in range(7):
        for batch, times in seconds.items():
            began = time.perf_counter()
            asked(engine, pixels[:BATCH], torch.arange(BATCH), batch)
            times.append(time.perf_counter() - began)
    ratio = statistics.median(a / b for a, b in zip(seconds[1], seconds[BATCH], strict=True))
    print(f"{BATCH} images one by one take {ratio:.2f} times as long as at once")


if __name__ == "__main__":
    main()
