"""Ten tasks through ONNX beside the plain trunk in PyTorch: images a second, in one run.

    python benchmarks/serve/bench_engines.py --export-only     # several minutes, once
    python benchmarks/serve/bench_engines.py --threads 2 --seconds 60

The promise: with ten tasks attached, `onnx-int8` answers at least as many images a second as the
plain ViT-B/32 with no task does in PyTorch fp32, on as many threads, for 1 and for 16 images at
once. The contestants take turns, with a rest between them, because threads of onnxruntime spin on
for a while; the weights are random, because speed does not depend on them.

Exported graphs are kept in build/engines/ and compared with the model before every measurement;
`--again` makes them anew, which a change of the exporter asks for.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import onnx
import onnxruntime
import torch
from torch import Tensor

from engram.experiments.bench import shaped
from engram.experiments.timing import Case, Timing, compare, machine, machine_words
from engram.export.graphs import about, describe
from engram.export.quantise import quantised
from engram.export.runtime import BATCHES, OnnxModel, check_pixels
from engram.export.runtime import compare as compare_answers
from engram.export.write import export_onnx
from engram.images.preprocessing import Preprocessing
from engram.inference.engine import OneByOne
from engram.model import MemoryViT
from engram.util.files import write_atomically
from engram.vit import ViT

HERE = Path(__file__).resolve().parent
KEPT = HERE.parents[1] / "build" / "engines"
PLAIN = "plain trunk, torch"
INT8 = "onnx-int8"
FAR = {"onnx": 1e-3, INT8: 0.5}  # length of the difference, as a share of the logits'


def answer(model: ViT | MemoryViT, pixels: Tensor) -> None:
    with torch.inference_mode():
        model(pixels)


def make_model(shape: str, tasks: int, cells: int, classes: int) -> MemoryViT:
    torch.manual_seed(0)  # so that graphs that were kept belong to it
    trunk = shaped(shape)
    trunk.preprocessing = Preprocessing(trunk.config.image_size)
    model = MemoryViT(trunk).eval()
    for i in range(tasks):
        task = model.add_task(f"task{i}", classes, cells)
        torch.nn.init.normal_(task.head.weight, std=0.1)
    return model


def export(model: MemoryViT, folder: Path, again: bool) -> dict[str, Path]:
    """The graphs by engine, from `folder` where they are kept; the model is traced once."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.onnx" for name in FAR}
    if again or not paths["onnx"].exists():
        print("exporting", flush=True)
        made = export_onnx(model, paths["onnx"])
        print(f"{made.bytes / 1e6:.0f} MB in {made.seconds:.0f} s", flush=True)
        paths[INT8].unlink(missing_ok=True)
    if not paths[INT8].exists():
        print("quantising", flush=True)
        began = time.monotonic()
        assert model.trunk.preprocessing is not None
        pixels = check_pixels(model.trunk.preprocessing, sum(BATCHES))
        proto = quantised(onnx.load(paths["onnx"]), pixels, folder)
        describe(proto, about(model, ["base", *model.tasks], int8=True))
        write_atomically(paths[INT8], proto.SerializeToString())
        print(f"in {time.monotonic() - began:.0f} s", flush=True)
    return paths


def check(model: MemoryViT, name: str, engine: OnnxModel) -> None:
    """Refuse a graph that answers otherwise than the model that it is measured beside."""
    assert model.trunk.preprocessing is not None
    pixels = check_pixels(model.trunk.preprocessing, sum(BATCHES))
    with torch.inference_mode():
        expected = model(pixels)
    for task, change in compare_answers(engine.run, pixels, expected).items():
        if not change.relative <= FAR[name]:
            raise SystemExit(
                f"{name} is off by {change.relative:.2g} in {task}; make it anew with --again."
            )


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
    parser.add_argument("--kept", type=Path, default=KEPT, help="where exported graphs are")
    parser.add_argument("--again", action="store_true", help="export even if they are there")
    parser.add_argument("--export-only", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "ENGINES.md")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = make_model(given.shape, given.tasks, given.cells, given.classes)
    trunk, preprocessing = model.trunk, model.trunk.preprocessing
    assert preprocessing is not None
    what = f"{given.shape}-{given.tasks}-{given.cells}-{given.classes}".replace("/", "-")
    paths = export(model, given.kept / what, given.again)
    if given.export_only:
        return
    engines = {}
    for name, path in paths.items():
        engines[name] = OnnxModel(path, given.threads)
        check(model, name, engines[name])
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
        pixels = check_pixels(preprocessing, batch)
        cases = {PLAIN: Case(partial(answer, trunk, pixels))}
        cases[f"{given.tasks} tasks, torch"] = Case(partial(answer, model, pixels))
        for name, engine in engines.items():
            cases[f"{given.tasks} tasks, {name}"] = Case(partial(engine.run, pixels))
        if batch > 1:  # as the service asks it
            one_by_one = partial(OneByOne(engines[INT8]).run, pixels, engines[INT8].tasks)
            cases[f"{given.tasks} tasks, {INT8}, one at a time"] = Case(one_by_one)
        found = compare(cases, seconds=given.seconds, least=given.rounds, most=200, rest=0.2)
        lines += table(batch, found)
        print("\n".join(table(batch, found)), flush=True)
        best = 1 / found[f"{given.tasks} tasks, {INT8}"].ratio
        kept = "kept" if best >= 1 else "NOT kept"
        lines += [f"Promise (at least 1.00 for onnx-int8): {kept}, {best:.2f}.", ""]
    given.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
