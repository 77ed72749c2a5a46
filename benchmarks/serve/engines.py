"""Throughput of ten tasks in ONNX, compared with the plain trunk in PyTorch in the same run.

    python -m benchmarks.serve.engines --export-only     # several minutes, once
    python -m benchmarks.serve.engines --threads 2 --seconds 60

The promise: with ten tasks attached, `onnx-int8` processes at least as many images per second as
the plain ViT-B/32 with no task does in PyTorch fp32, with the same number of threads, at batch 1
and 16. The engines take turns, with a pause after each, because threads of onnxruntime keep
spinning for a while. The weights are random: speed does not depend on them.

The result is benchmarks/results/engines.md. Exported graphs are kept in build/engines/ and compared
with the model before every measurement; export again with `--again` after changing the exporter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import onnx
import onnxruntime
import torch
from torch import Tensor

from benchmarks.paths import BUILD, RESULTS
from benchmarks.report import markdown_table
from engram.experiments.timing import Case, Timing, compare, describe_machine, machine
from engram.export import OnnxModel, export_onnx
from engram.export.graphs import metadata, set_metadata
from engram.export.quantise import quantise
from engram.export.verify import BATCHES, generated_pixels
from engram.export.verify import compare as compare_answers
from engram.images.preprocessing import Preprocessing
from engram.inference.engine import OneByOne
from engram.model import MemoryViT
from engram.trunks.random import trunk_of_shape
from engram.util.files import write_atomically
from engram.vit import ViT

EXPORTED = BUILD / "engines"
PLAIN = "plain trunk, torch"
INT8 = "onnx-int8"
LARGEST_ERROR = {"onnx": 1e-3, INT8: 0.5}  # norm of the difference, as a share of the logits'


def run_torch(model: ViT | MemoryViT, pixels: Tensor) -> None:
    with torch.inference_mode():
        model(pixels)


def make_model(shape: str, tasks: int, cells: int, classes: int) -> MemoryViT:
    torch.manual_seed(0)  # graphs that were exported earlier have the same weights
    trunk = trunk_of_shape(shape)
    trunk.preprocessing = Preprocessing(trunk.config.image_size)
    model = MemoryViT(trunk).eval()
    for i in range(tasks):
        task = model.add_task(f"task{i}", classes, cells)
        torch.nn.init.normal_(task.head.weight, std=0.1)
    return model


def export(model: MemoryViT, folder: Path, again: bool) -> dict[str, Path]:
    """The graphs by engine, taken from `folder` if they exist; the model is traced only once."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.onnx" for name in LARGEST_ERROR}
    if again or not paths["onnx"].exists():
        print("exporting", flush=True)
        made = export_onnx(model, paths["onnx"])
        print(f"{made.bytes / 1e6:.0f} MB in {made.seconds:.0f} s", flush=True)
        paths[INT8].unlink(missing_ok=True)
    if not paths[INT8].exists():
        print("quantising", flush=True)
        began = time.monotonic()
        assert model.trunk.preprocessing is not None
        pixels = generated_pixels(model.trunk.preprocessing, sum(BATCHES))
        proto = quantise(onnx.load(paths["onnx"]), pixels, folder)
        set_metadata(proto, metadata(model, ["base", *model.tasks], int8=True))
        write_atomically(paths[INT8], proto.SerializeToString())
        print(f"in {time.monotonic() - began:.0f} s", flush=True)
    return paths


def check(model: MemoryViT, name: str, engine: OnnxModel) -> None:
    """Refuse a graph whose answers differ from those of the model it is compared with."""
    assert model.trunk.preprocessing is not None
    pixels = generated_pixels(model.trunk.preprocessing, sum(BATCHES))
    with torch.inference_mode():
        expected = model(pixels)
    for task, found in compare_answers(engine.run, pixels, expected).items():
        if not found.relative <= LARGEST_ERROR[name]:
            raise SystemExit(
                f"{name} differs by {found.relative:.2g} in {task}; export it with --again."
            )


def table(batch: int, found: dict[str, Timing]) -> list[str]:
    rows = []
    for name, timing in found.items():
        # a ratio of throughputs is the inverse of a ratio of times
        ratio = f"{1 / timing.ratio:.2f} ({1 / timing.high:.2f} to {1 / timing.low:.2f})"
        rows.append([name, f"{batch / timing.seconds:.1f}", ratio])
    rounds = next(iter(found.values())).rounds
    head = ("", "images/s", "relative to the plain trunk in torch (quartiles)")
    return [f"## Batch {batch}", "", *markdown_table(head, rows), "", f"{rounds} rounds.", ""]


def cases_of(model: MemoryViT, engines: Mapping[str, OnnxModel], batch: int) -> dict[str, Case]:
    """What is timed at one batch size."""
    trunk, preprocessing, tasks = model.trunk, model.trunk.preprocessing, len(model.tasks)
    assert preprocessing is not None
    pixels = generated_pixels(preprocessing, batch)
    cases = {PLAIN: Case(partial(run_torch, trunk, pixels))}
    cases[f"{tasks} tasks, torch"] = Case(partial(run_torch, model, pixels))
    for name, engine in engines.items():
        cases[f"{tasks} tasks, {name}"] = Case(partial(engine.run, pixels))
    if batch > 1:  # this is how the service calls int8
        one_by_one = partial(OneByOne(engines[INT8]).run, pixels, engines[INT8].tasks)
        cases[f"{tasks} tasks, {INT8}, one at a time"] = Case(one_by_one)
    return cases


def measure(
    model: MemoryViT, engines: Mapping[str, OnnxModel], given: argparse.Namespace
) -> list[str]:
    lines: list[str] = []
    for batch in (int(part) for part in given.batches.split(",")):
        cases = cases_of(model, engines, batch)
        found = compare(cases, seconds=given.seconds, least=given.rounds, most=200, rest=0.2)
        lines += table(batch, found)
        print("\n".join(table(batch, found)), flush=True)
        best = 1 / found[f"{given.tasks} tasks, {INT8}"].ratio
        verdict = "kept" if best >= 1 else "NOT kept"
        lines += [f"Promise (at least 1.00 for {INT8}): {verdict}, {best:.2f}.", ""]
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.engines", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    add("--shape", default="ViT-B/32", help="architecture of the trunk")
    add("--tasks", type=int, default=10, help="number of tasks")
    add("--cells", type=int, default=5, help="cells of each task")
    add("--classes", type=int, default=10, help="classes of each task")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of every engine")
    add("--seconds", type=float, default=60, help="time for each batch size")
    add("--rounds", type=int, default=5, help="minimum number of rounds, whatever they take")
    add("--batches", default="1,16", help="batch sizes")
    add("--exported", type=Path, default=EXPORTED, help="folder of the exported graphs")
    add("--again", action="store_true", help="export even if the graphs exist")
    add("--export-only", action="store_true", help="export and measure nothing")
    add("--out", type=Path, default=RESULTS / "engines.md", help="page to write")
    return parser.parse_args()


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    model = make_model(given.shape, given.tasks, given.cells, given.classes)
    folder = f"{given.shape}-{given.tasks}-{given.cells}-{given.classes}".replace("/", "-")
    paths = export(model, given.exported / folder, given.again)
    if given.export_only:
        return
    engines = {}
    for name, path in paths.items():
        engines[name] = OnnxModel(path, given.threads)
        check(model, name, engines[name])
    lines = [
        f"# {given.tasks} tasks in ONNX, compared with the plain trunk",
        "",
        f"{given.shape} with random weights, {given.tasks} tasks of {given.cells} cells and "
        f"{given.classes} classes, {given.threads} threads for every engine. Measured by `python "
        f"-m benchmarks.serve.engines` on {describe_machine(machine())}, onnxruntime "
        f"{onnxruntime.__version__}.",
        "",
        *measure(model, engines, given),
    ]
    given.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
