"""The service's engines with ten tasks, compared with the plain backbone in PyTorch.

    python -m benchmarks.serve.engines --threads 2 --seconds 60

The promises: with ten tasks attached, `onnx-int8` processes at least 1.6 times as many images per
second as the plain ViT-B/32 with no task does in PyTorch fp32, with the same number of threads, in
batches of 16 (and no fewer at batch 1); `openvino`, in bf16, at least 1.8 times as many as `onnx`;
an answer of a rounding engine is bit for bit that of the image alone; and another task is attached
in seconds. The engines take turns, with a pause after each, because
threads of onnxruntime keep spinning for a while. The weights are random: speed does not depend on
them. The result is benchmarks/results/engines.md. A few minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import onnxruntime
import openvino
import torch
from torch import Tensor

from benchmarks.paths import RESULTS
from benchmarks.report import markdown_table
from engram.backbones.random import backbone_of_shape
from engram.experiments.timing import Case, Timing, compare, describe_machine, machine
from engram.export.onnx_engine import OnnxEngine
from engram.export.runtime import RUNTIMES
from engram.export.verify import generated_pixels
from engram.images.preprocessing import Preprocessing
from engram.model import MemoryViT
from engram.vit import ViT

PLAIN = "plain backbone, torch"
INT8 = "onnx-int8"
LEAST = {1: 1.0, 16: 1.6}  # of INT8, by batch size
BF16 = 1.8  # of OpenVINO in bf16, relative to onnxruntime in fp32


def run_torch(model: ViT | MemoryViT, pixels: Tensor) -> None:
    with torch.inference_mode():
        model(pixels)


def make_model(shape: str, tasks: int, cells: int, classes: int) -> MemoryViT:
    torch.manual_seed(0)
    backbone = backbone_of_shape(shape)
    backbone.preprocessing = Preprocessing(backbone.config.image_size)
    model = MemoryViT(backbone).eval()
    for i in range(tasks):
        task = model.add_task(f"task{i}", classes, cells)
        torch.nn.init.normal_(task.head.weight, std=0.1)
    return model


def with_another(model: MemoryViT) -> MemoryViT:
    """The model as the service makes it to attach a task."""
    other = MemoryViT(model.backbone).eval()
    for name in model.tasks:
        other.attach(model.engram(name))
    other.add_task("another", 10, 5)
    return other


def start(model: MemoryViT) -> tuple[dict[str, OnnxEngine], list[str]]:
    """The engines by name, and lines that say how long they take to start and to attach."""
    engines, rows = {}, []
    for name, runtime in RUNTIMES.items():
        began = time.monotonic()
        engines[name] = OnnxEngine(model, runtime)
        started, other = time.monotonic(), with_another(model)
        OnnxEngine(other, runtime, before=engines[name])
        attached = time.monotonic()
        rows.append([name, f"{started - began:.1f}", f"{attached - started:.1f}"])
    head = ("", "start (s)", "attach another task (s)")
    about = "All with the comparison of all answers with those of the model."
    return engines, ["## Start and attach", "", *markdown_table(head, rows), "", about, ""]


def check_neighbours(engines: Mapping[str, OnnxEngine], images: int) -> list[str]:
    """Every image in a batch, and alone: the same bits, where the engine rounds."""
    rounding = {name: engine for name, engine in engines.items() if engine.runtime.rounds}
    for name, engine in rounding.items():
        pixels = generated_pixels(engine.model.preprocessing, images)
        together = engine.run(pixels, engine.names)
        for i in range(images):
            alone = engine.run(pixels[i : i + 1], engine.names)
            if any(not torch.equal(alone[task][0], together[task][i]) for task in engine.names):
                raise SystemExit(f"{name}: the answers for image {i} depend on the other images.")
    same = "images in one batch have bit for bit the answers of each alone."
    return [f"{', '.join(rounding)}: {images} {same}", ""]


def differences(model: MemoryViT, engines: Mapping[str, OnnxEngine], images: int) -> list[str]:
    """Outputs of the engines compared with the model's, over all tasks."""
    pixels, rows = generated_pixels(model.preprocessing, images, seed=1), []
    with torch.inference_mode():
        expected = model(pixels)
    for name, engine in engines.items():
        found = engine.run(pixels, engine.names)
        errors = torch.cat([(found[n] - expected[n]).flatten() for n in engine.names])
        sizes = torch.cat([expected[n].flatten() for n in engine.names])
        relative = float(errors.norm() / sizes.norm())
        rows.append([name, f"{float(errors.abs().max()):.2g}", f"{relative:.2g}"])
    head = ("", "largest difference of a logit", "norm of the difference to norm of the logits")
    return ["## Differences to the model", "", *markdown_table(head, rows), ""]


def table(batch: int, found: dict[str, Timing]) -> list[str]:
    rows = []
    for name, timing in found.items():
        # a ratio of throughputs is the inverse of a ratio of times
        ratio = f"{1 / timing.ratio:.2f} ({1 / timing.high:.2f} to {1 / timing.low:.2f})"
        rows.append([name, f"{batch / timing.seconds:.1f}", ratio])
    rounds = next(iter(found.values())).rounds
    head = ("", "images/s", "relative to the plain backbone in torch (quartiles)")
    return [f"## Batch {batch}", "", *markdown_table(head, rows), "", f"{rounds} rounds.", ""]


def cases_of(model: MemoryViT, engines: Mapping[str, OnnxEngine], batch: int) -> dict[str, Case]:
    """What is timed at one batch size."""
    backbone, tasks = model.backbone, len(model.tasks)
    pixels = generated_pixels(model.preprocessing, batch)
    cases = {PLAIN: Case(partial(run_torch, backbone, pixels))}
    cases[f"{tasks} tasks, torch"] = Case(partial(run_torch, model, pixels))
    for name, engine in engines.items():
        cases[f"{tasks} tasks, {name}"] = Case(partial(engine.run, pixels, engine.names))
    return cases


def measure(
    model: MemoryViT, engines: Mapping[str, OnnxEngine], given: argparse.Namespace
) -> list[str]:
    lines: list[str] = []
    for batch in (int(part) for part in given.batches.split(",")):
        cases = cases_of(model, engines, batch)
        found = compare(cases, seconds=given.seconds, least=given.rounds, most=200, rest=0.2)
        lines += table(batch, found)
        print("\n".join(table(batch, found)), flush=True)
        speeds = {name: 1 / found[f"{given.tasks} tasks, {name}"].ratio for name in engines}
        best, least = speeds[INT8], LEAST.get(batch, 1.0)
        verdict = "kept" if best >= least else "NOT kept"
        lines += [f"Promise (at least {least:.2f} for {INT8}): {verdict}, {best:.2f}.", ""]
        best = speeds["openvino"] / speeds["onnx"]
        verdict = "kept" if best >= BF16 else "NOT kept"
        lines += [f"Promise (openvino at least {BF16} times onnx): {verdict}, {best:.2f}.", ""]
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.engines", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    add("--shape", default="ViT-B/32", help="architecture of the backbone")
    add("--tasks", type=int, default=10, help="number of tasks")
    add("--cells", type=int, default=5, help="cells of each task")
    add("--classes", type=int, default=10, help="classes of each task")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of every engine")
    add("--seconds", type=float, default=60, help="time for each batch size")
    add("--rounds", type=int, default=5, help="minimum number of rounds, whatever they take")
    add("--batches", default="1,16", help="batch sizes")
    add("--out", type=Path, default=RESULTS / "engines.md", help="page to write")
    return parser.parse_args()


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    model = make_model(given.shape, given.tasks, given.cells, given.classes)
    engines, started = start(model)
    print("\n".join(started), flush=True)
    lines = [
        f"# {given.tasks} tasks in other engines, compared with the plain backbone",
        "",
        f"{given.shape} with random weights, {given.tasks} tasks of {given.cells} cells and "
        f"{given.classes} classes, {given.threads} threads for every engine. Measured by `python "
        f"-m benchmarks.serve.engines` on {describe_machine(machine())}, onnxruntime "
        f"{onnxruntime.__version__}, OpenVINO {openvino.__version__}.",
        "",
        *started,
        *check_neighbours(engines, 5),
        *differences(model, engines, 16),
        *measure(model, engines, given),
    ]
    given.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
