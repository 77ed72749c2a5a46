"""Ten tasks through ONNX beside the plain trunk in PyTorch: images a second, in one run.

    python benchmarks/serve/bench_engines.py --threads 2 --seconds 60

The promise: with ten tasks attached, `onnx-int8` answers at least as many images a second as the
plain ViT-B/32 with no task does in PyTorch fp32, on as many threads, for 1 and for 16 images at
once. The contestants take turns; the weights are random, because speed does not depend on them.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from engram.bench import shaped
from engram.export import OnnxModel, check_pixels, export_onnx
from engram.images import Preprocessing
from engram.model import MemoryViT
from engram.timing import Case, Timing, compare, machine, machine_words
from engram.vit import ViT

HERE = Path(__file__).parent
PLAIN = "plain trunk, torch"


def answer(model: ViT | MemoryViT, pixels: Tensor) -> None:
    with torch.inference_mode():
        model(pixels)


def table(batch: int, found: dict[str, Timing]) -> list[str]:
    lines = [
        f"## {batch} image{'s' * (batch > 1)} at once",
        "",
        "| | images/s | beside the plain trunk in torch (quartiles) |",
        "|---|---|---|",
    ]
    for name, timing in found.items():
        # as many times as many images, so the ratio of times is turned over
        ratio = f"{1 / timing.ratio:.2f} ({1 / timing.high:.2f} to {1 / timing.low:.2f})"
        lines.append(f"| {name} | {batch / timing.seconds:.1f} | {ratio} |")
    rounds = next(iter(found.values())).rounds
    return [*lines, "", f"{rounds} rounds.", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="ViT-B/32")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--cells", type=int, default=5)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=60, help="for each table")
    parser.add_argument("--rounds", type=int, default=5, help="at least, whatever they take")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--out", type=Path, default=HERE / "ENGINES.md")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    trunk = shaped(given.shape)
    trunk.preprocessing = Preprocessing(trunk.config.image_size)
    model = MemoryViT(trunk).eval()
    for i in range(given.tasks):
        task = model.add_task(f"task{i}", given.classes, given.cells)
        torch.nn.init.normal_(task.head.weight, std=0.1)
    with tempfile.TemporaryDirectory() as folder:
        engines = {}
        for name, int8 in (("onnx", False), ("onnx-int8", True)):
            print(f"exporting {name}", flush=True)
            made = export_onnx(model, Path(folder) / f"{name}.onnx", int8=int8)
            print(f"{made.bytes / 1e6:.0f} MB in {made.seconds:.0f} s", flush=True)
            engines[name] = OnnxModel(made.path, given.threads)
    lines = [
        f"# {given.tasks} tasks through ONNX beside the plain trunk",
        "",
        f"{given.shape} with random weights, {given.tasks} tasks of {given.cells} cells and "
        f"{given.classes} classes, {given.threads} threads for everybody; made by "
        "`benchmarks/serve/bench_engines.py` "
        f"on {machine_words(machine())}, onnxruntime {onnxruntime.__version__}.",
        "",
    ]
    for batch in (int(part) for part in given.batches.split(",")):
        pixels = check_pixels(trunk.preprocessing, batch)
        cases = {PLAIN: Case(partial(answer, trunk, pixels))}
        cases[f"{given.tasks} tasks, torch"] = Case(partial(answer, model, pixels))
        for name, engine in engines.items():
            cases[f"{given.tasks} tasks, {name}"] = Case(partial(engine.run, pixels))
        found = compare(cases, seconds=given.seconds, least=given.rounds, most=200)
        lines += table(batch, found)
        print("\n".join(table(batch, found)), flush=True)
        best = 1 / found[f"{given.tasks} tasks, onnx-int8"].ratio
        kept = "kept" if best >= 1 else "NOT kept"
        lines += [f"Promise (at least 1.00 for onnx-int8): {kept}, {best:.2f}.", ""]
    given.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
