"""A model as one file for other programs: ONNX or torch.export, checked before it is kept.

The file answers for the trunk and all tasks at once, for any number of images. Keys and values of
cells depend on no image, so they are constants in it. What it needs to be used is inside: how
pictures become pixels, what the classes are called, which engrams it was made from.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from engram import standalone
from engram.bundles import Source, load_model
from engram.describe import Description
from engram.errors import EngramError
from engram.evaluate import answers, preprocessing_of
from engram.feeds import Progress
from engram.files import write_atomically
from engram.images import Preprocessing, evaluation_view, normalise
from engram.memory import Memory
from engram.model import MemoryViT
from engram.scenes import draw_scenes
from engram.vit import ViT

FORMAT = 1  # of the metadata
OPSET = 20
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
INPUT = "pixels"
KEY = "engram"  # of the metadata in an ONNX file; in a .pt2 it is the file engram.json

#: How far a logit may be from the model's, as a share of the largest one (or of 1).
TOLERANCE = 1e-4
#: The same for int8, where rounding is the purpose: the error's length, as a share of the logits'.
INT8_TOLERANCE = 0.5

#: A product stays in floats if a value of its input is so many times larger than most.
OUTLIER = 50

_BATCHES = (1, 3, 8)  # pictures, to see that any number of them gives the same answers
_MOST_BYTES = 2**31 - 2**24  # an ONNX file is one protobuf message

Answer = Callable[[Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Export:
    """A file that was checked and kept."""

    path: Path
    format: str  # onnx or torch
    int8: bool
    bytes: int
    seconds: float
    changes: Mapping[str, Change]  # by task, on generated pictures
    script: Path | None  # predict.py, if it was written


@dataclass(frozen=True)
class Change:
    """How the exported file's logits differ from the model's on the same pictures."""

    largest: float  # of all differences
    relative: float  # length of the difference, as a share of the length of the logits
    agreement: float  # how often the best class is the same
    size: float  # the largest logit of the model


# What is exported


class _Fixed(MemoryViT):
    """A copy of a model in which nothing is left to compute but what depends on the image."""

    def __init__(self, model: MemoryViT, names: Sequence[str], size: tuple[int, int]) -> None:
        super().__init__(_at_size(model.trunk, size), unmasked=model.unmasked)
        self.names = names
        for task in model.tasks.values():
            own = copy.deepcopy(task)
            if own.trunk is not None:
                own.trunk = _at_size(own.trunk, size)
            self._put(own)
        self.to("cpu").eval().requires_grad_(False)
        masked = [n for n in names if n != "base" and self.task(n).spec.parts.masked]
        self.constants: tuple[Memory, list[str]] | None = None
        if masked:
            with torch.no_grad():
                self.constants = self._make_memory(self._closure(masked)), self._closure(masked)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(pixels, self.names)

    def _memory(self, names: Sequence[str], x: Tensor) -> tuple[Memory, list[str]]:
        assert self.constants is not None
        return self.constants


def _at_size(trunk: ViT, size: tuple[int, int]) -> ViT:
    """A copy whose own size is this one, so that no position is resized in the graph."""
    trunk = copy.deepcopy(trunk)
    patch = trunk.config.patch
    with torch.no_grad():
        position = trunk._position((size[0] // patch, size[1] // patch)).clone()
    trunk.position = nn.Parameter(position, requires_grad=False)
    trunk.config = replace(trunk.config, image_size=size)
    return trunk


def about(model: MemoryViT, names: Sequence[str], int8: bool = False) -> dict[str, Any]:
    """What a file says of itself, as JSON has it."""
    from engram import __version__

    tasks: dict[str, Any] = {}
    for name in names:
        if name == "base":
            assert model.trunk.config.head is not None
            classes = model.trunk.config.head.classes
            labels = model.trunk.labels or [str(i) for i in range(classes)]
            kind = "classification" if classes else "embedding"
            tasks[name] = {"kind": kind, "classes": list(labels)}
        else:
            spec, head = model.task(name).spec, model.task(name).head
            tasks[name] = {
                "kind": spec.kind,
                "classes": list(spec.classes),
                **{what: values.tolist() for what, values in head.settled.items()},
                **({"values": list(spec.values)} if spec.values else {}),
                "regime": spec.regime,
                "extends": list(spec.extends),
                "content": model.engram(name).content,
            }
    return {
        "format": FORMAT,
        "library": f"engram-vit {__version__}",
        "precision": "int8" if int8 else "float32",
        "preprocessing": preprocessing_of(model).to_dict(),
        "trunk": {"source": model.trunk.source, "fingerprint": model.trunk.fingerprint},
        "tasks": tasks,
    }


# Writing


def export_onnx(
    model: MemoryViT,
    path: str | Path,
    *,
    int8: bool = False,
    tasks: Sequence[str] | None = None,
    overwrite: bool = True,
) -> Export:
    """Write a model as ONNX, one output a task, with a small `predict.py` beside it.

    With `int8` the large products are computed with whole numbers. A file whose answers are not
    the model's is not kept. The model itself is left as it is.
    """
    began, path = time.monotonic(), Path(path)
    check_place(path, "onnx", overwrite)
    require("onnx", "onnxscript", "onnxruntime")
    names, pixels, expected = _asked(model, tasks)
    size = sum(p.numel() for p in model.parameters()) * 4
    if size > _MOST_BYTES:
        raise EngramError(
            f"The model has {size / 1e9:.1f} GB of weights, and an ONNX file holds at most 2 GB; "
            "export it as .pt2 instead."
        )
    program = _trace(model, names, pixels)
    with _quiet():
        graph = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
        )
    assert graph is not None
    proto = graph.model_proto
    _name(proto, names)
    _describe(proto, about(model, names))
    data = proto.SerializeToString()
    changes = compare(OnnxModel(data).run, pixels, expected)
    _refuse(path, changes, int8=False)
    if int8:
        data = _quantised(proto, pixels, about(model, names, int8=True), path)
        changes = compare(OnnxModel(data).run, pixels, expected)
        _refuse(path, changes, int8=True)
    write_atomically(path, data)
    script = _write_script(path)
    return Export(path, "onnx", int8, len(data), time.monotonic() - began, changes, script)


def export_torch(
    model: MemoryViT,
    path: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    overwrite: bool = True,
) -> Export:
    """Write a model with torch.export, as a .pt2 that torch runs without this package."""
    began, path = time.monotonic(), Path(path)
    check_place(path, "torch", overwrite)
    names, pixels, expected = _asked(model, tasks)
    program = _trace(model, names, pixels)
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(
            program, buffer, extra_files={f"{KEY}.json": json.dumps(about(model, names))}
        )
        loaded = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    changes = compare(cast("Answer", loaded), pixels, expected)
    _refuse(path, changes, int8=False)
    write_atomically(path, buffer.getvalue())
    size, seconds = len(buffer.getvalue()), time.monotonic() - began
    return Export(path, "torch", False, size, seconds, changes, None)


def check_place(path: Path, kind: str, overwrite: bool) -> None:
    """Refuse a place that a file of this format cannot be written to, before any work is done."""
    suffix = SUFFIXES[kind]
    if path.suffix != suffix:
        raise EngramError(
            f"{path} does not end in {suffix}; give -o a name such as model{suffix}, or choose "
            f"another format ({', '.join(f'{k}: {v}' for k, v in SUFFIXES.items())})."
        )
    if path.is_dir():
        raise EngramError(f"{path} is a folder; -o names the file to write.")
    if path.exists() and not overwrite:
        raise EngramError(
            f"{path} is there already; choose another -o, or replace it with --overwrite."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EngramError(
            f"{path} cannot be written ({error.strerror or error}); choose another -o."
        ) from None


def require(*packages: str) -> None:
    """Refuse with a sentence that names the extra when one of its packages is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            raise EngramError(
                f"ONNX needs the package {package}, which is not installed; install the extra "
                "with pip install 'engram-vit[export]'."
            ) from None


def _asked(
    model: MemoryViT, tasks: Sequence[str] | None
) -> tuple[list[str], Tensor, dict[str, Tensor]]:
    """The outputs' names, pictures to check them with, and what the model says about those."""
    names = model._requested(tasks)
    if not names:
        raise EngramError("There is nothing to export: the trunk has no head, and no task is here.")
    if INPUT in names:
        raise EngramError(
            f"A task is called {INPUT!r}, which is what the exported file calls its input; save "
            "the task under another name (engram.inspect(FILE).renamed(NAME))."
        )
    position = model.trunk.position
    if position.dtype != torch.float32:
        raise EngramError(
            f"The model is in {position.dtype}, and files are written in torch.float32; cast it "
            "with model.float() first."
        )
    pixels = check_pixels(preprocessing_of(model), sum(_BATCHES))
    with torch.inference_mode():
        expected = model(pixels.to(position.device), names)
    return names, pixels, {name: logits.cpu() for name, logits in expected.items()}


def check_pixels(preprocessing: Preprocessing, number: int, seed: int = 0) -> Tensor:
    """Generated pictures (coloured shapes on textures), as the trunk takes them."""
    scenes = draw_scenes(number, seed, max(32, *preprocessing.size)).pixels
    views = np.stack([evaluation_view(scene, preprocessing) for scene in scenes])
    return normalise(torch.from_numpy(views), preprocessing)


def _trace(model: MemoryViT, names: Sequence[str], pixels: Tensor) -> torch.export.ExportedProgram:
    fixed = _Fixed(model, names, preprocessing_of(model).size)
    batch = {INPUT: {0: torch.export.Dim("batch", min=1)}}
    with _quiet(), torch.no_grad():
        program = torch.export.export(fixed, (pixels[:2],), dynamic_shapes=batch, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # the paths of this machine
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters' own remarks are of no use to anybody here."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _name(proto: Any, names: Sequence[str]) -> None:
    """Call the input, the outputs and their free axis what they are.

    All other values get a name that no task can have: theirs are words like "add" and "linear".
    """
    graph = proto.graph
    del graph.metadata_props[:]
    for item in (*graph.node, *graph.input, *graph.output, *graph.value_info):
        del item.metadata_props[:]  # which line of whose source made it, with its path
        item.doc_string = ""
    called = {graph.input[0].name: INPUT}
    called.update({value.name: name for value, name in zip(graph.output, names, strict=True)})
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = called.get(value.name, f"/{value.name}")
    for node in graph.node:
        node.input[:] = [called.get(name, f"/{name}") if name else "" for name in node.input]
        node.output[:] = [called.get(name, f"/{name}") if name else "" for name in node.output]
    for value in (*graph.input, *graph.output):
        dimension = value.type.tensor_type.shape.dim[0]
        if dimension.dim_param:
            dimension.dim_param = "batch"


def _describe(proto: Any, document: Mapping[str, Any]) -> None:
    del proto.metadata_props[:]
    proto.metadata_props.add(key=KEY, value=json.dumps(document))
    proto.producer_name, proto.producer_version = document["library"].split()


def _quantised(proto: Any, pixels: Tensor, document: Mapping[str, Any], path: Path) -> bytes:
    """The same graph with whole numbers in the products whose weights are constants."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    products = _without_outliers(proto, _products(proto), pixels)
    _unshare(proto)
    del proto.graph.value_info[:]  # shapes that the exporter noted contradict the quantiser's
    del proto.metadata_props[:]
    # says that shapes are known, which spares users a remark about a step that changes nothing
    proto.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".engram-") as folder:
            source, target = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
            source.write_bytes(proto.SerializeToString())
            quantize_dynamic(
                source,
                target,
                nodes_to_quantize=products,
                op_types_to_quantize=["MatMul"],
                weight_type=QuantType.QInt8,
                per_channel=True,
                reduce_range=True,
            )
            quantised = onnx.load(target)
    except OSError as error:
        raise EngramError(
            f"{path} cannot be written ({error.strerror or error}); check the folder, its "
            "permissions and the free space. What was there is unchanged."
        ) from None
    _describe(quantised, document)
    data: bytes = quantised.SerializeToString()
    return data


def _unshare(proto: Any) -> None:
    """Give every Gemm a weight of its own: the quantiser transposes them in place, each time.

    Two tasks whose heads are equal, as those of untrained ones are, share one otherwise.
    """
    weights = {one.name: one for one in proto.graph.initializer}
    seen: set[str] = set()
    for number, node in enumerate(proto.graph.node):
        name = node.input[1] if node.op_type == "Gemm" else ""
        if name in seen and name in weights:
            own = proto.graph.initializer.add()
            own.CopyFrom(weights[name])
            own.name = node.input[1] = f"{name}/{number}"
        seen.update(node.input)


def _products(proto: Any) -> list[str]:
    """The nodes that multiply tokens by a weight of the trunk: nearly all the work there is.

    Heads and adapters stay as they are: they take no time, and rounding them would cost accuracy.
    """
    matrices = {one.name for one in proto.graph.initializer if len(one.dims) == 2}
    return [
        node.name
        for node in proto.graph.node
        if node.op_type == "MatMul" and node.input[1] in matrices
    ]


def _without_outliers(proto: Any, products: Sequence[str], pixels: Tensor) -> list[str]:
    """The products whose input has no value so large that rounding would leave nothing else.

    One input has one step for all of its values. Some ViTs have a layer in which one channel is
    hundreds of times larger than the others: rounded to 255 steps of it, those are all zero.
    """
    import onnxruntime

    whole = type(proto)()
    whole.CopyFrom(proto)
    inputs = {node.name: node.input[0] for node in proto.graph.node if node.name in products}
    for value in dict.fromkeys(inputs.values()):
        whole.graph.output.add().name = value
    session = onnxruntime.InferenceSession(
        whole.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    kept = []
    for name, value in inputs.items():
        (seen,) = session.run([value], {INPUT: pixels.numpy()})
        if np.abs(seen).max() <= OUTLIER * max(float(np.sqrt(np.mean(seen**2))), 1e-30):
            kept.append(name)
    return kept


def _write_script(path: Path) -> Path | None:
    """Put predict.py beside an ONNX file, unless somebody else's file has that name."""
    text = Path(standalone.__file__).read_text(encoding="utf-8")
    script = path.with_name("predict.py")
    if script.exists():
        first = text.splitlines()[0]
        with open(script, encoding="utf-8", errors="replace") as file:
            if file.readline().rstrip("\n") != first:
                return None
    text = text.replace('MODEL = "model.onnx"', f"MODEL = {path.name!r}")
    write_atomically(script, text.encode())
    return script


# Checking


def compare(answer: Answer, pixels: Tensor, expected: Mapping[str, Tensor]) -> dict[str, Change]:
    """Ask about the pictures in batches of several sizes, and compare with what was expected."""
    parts = [answer(part) for part in torch.split(pixels, list(_BATCHES))]
    changes = {}
    for name, wanted in expected.items():
        given = torch.cat([part[name] for part in parts])
        difference = given - wanted
        largest = float(difference.abs().max()) if bool(given.isfinite().all()) else float("inf")
        length = float(wanted.norm())
        changes[name] = Change(
            largest=largest,
            relative=float(difference.norm()) / length if length else largest,
            agreement=float((given.argmax(1) == wanted.argmax(1)).float().mean()),
            size=float(wanted.abs().max()),
        )
    return changes


def _refuse(path: Path, changes: Mapping[str, Change], int8: bool) -> None:
    for name, change in changes.items():
        far = not change.relative <= INT8_TOLERANCE
        if not int8:
            far = not change.largest <= TOLERANCE * max(1.0, change.size)
        if far:
            what = "with int8, " if int8 else ""
            raise EngramError(
                f"The exported {name!r} does not answer as the model does: {what}its logits are "
                f"off by up to {change.largest:.2g} (the largest is {change.size:.2g}), so {path} "
                "was not written."
            )


# Running


class OnnxModel:
    """An exported ONNX file, ready to answer; `about` is what it says of itself."""

    def __init__(self, path: str | Path | bytes, threads: int | None = None) -> None:
        require("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        source = path if isinstance(path, bytes) else os.fspath(path)
        shown = "The exported graph" if isinstance(path, bytes) else str(path)
        if isinstance(source, str) and not os.path.isfile(source):
            raise EngramError(f"{shown} does not exist; `engram export` writes such a file.")
        try:
            self._session = onnxruntime.InferenceSession(
                source, options, providers=["CPUExecutionProvider"]
            )
            metadata = self._session.get_modelmeta().custom_metadata_map
            self.about: dict[str, Any] = json.loads(metadata[KEY])
            self.tasks: tuple[str, ...] = tuple(self.about["tasks"])
        except Exception as error:  # whatever the runtime makes of a bad file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngramError(
                f"{shown} is not an ONNX file that `engram export` wrote ({reason})."
            ) from None

    def run(self, pixels: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Logits by name, of `tasks` or of all. Pixels are (b, 3, height, width), normalised."""
        names = list(self.tasks if tasks is None else dict.fromkeys(tasks))
        for name in names:
            if name not in self.tasks:
                raise EngramError(f"There is no {name!r} in this file: {', '.join(self.tasks)}.")
        array = pixels.detach().cpu().float().contiguous().numpy()
        found = self._session.run(names, {INPUT: array})
        return {name: torch.from_numpy(logits) for name, logits in zip(names, found, strict=True)}


class _Stand(MemoryViT):
    """A model whose answers are an exported file's, to be evaluated in its place."""

    def __init__(self, model: MemoryViT, answer: Answer) -> None:
        super().__init__(model.trunk)
        self._tasks, self.answer = dict(model.tasks), answer

    def forward(
        self, pixels: Tensor, tasks: Sequence[str] | None = None, exact: bool = False
    ) -> dict[str, Tensor]:
        found = self.answer(pixels)
        return {name: found[name] for name in self._requested(tasks)}


# The command


def export_job(
    sources: Sequence[Source],
    out: Path,
    *,
    kind: str | None,
    int8: bool,
    tasks: Sequence[str],
    data: Sequence[str],
    split: str,
    backbone: str | None,
    batch: int,
    workers: int,
    overwrite: bool,
    progress: Progress,
) -> Description:
    """`engram export`: write the file, and measure tasks on data before and after."""
    kind = _format(out, kind)
    check_place(out, kind, overwrite)
    if kind == "onnx":
        require("onnx", "onnxscript", "onnxruntime")
    elif int8:
        raise EngramError("int8 is for ONNX; give -o a name that ends in .onnx, or leave it out.")
    model = load_model(sources, backbone)
    names = model._requested(tasks or None)
    pairs = [_data_of(text, [name for name in names if name != "base"]) for text in data]

    def measure(which: MemoryViT, when: str) -> dict[str, dict[str, Any]]:
        return {
            name: answers(
                which, spec, name,
                split=split, batch=batch, workers=workers,
                progress=partial(progress, f"{name} {when}"),
            ).metrics()
            for name, spec in pairs
        }  # fmt: skip

    before = measure(model, "before")
    made: Export
    answer: Answer
    if kind == "onnx":
        made = export_onnx(model, out, int8=int8, tasks=names)
        answer = OnnxModel(out).run
    else:
        made = export_torch(model, out, tasks=names)
        program = torch.export.load(out).module()
        answer = lambda pixels: program(pixels)  # noqa: E731
    return _told(model, made, before, measure(_Stand(model, answer), "after"))


def _format(out: Path, kind: str | None) -> str:
    """What was asked for, or what the name's ending says."""
    known = ", ".join(f"{name} ({suffix})" for name, suffix in SUFFIXES.items())
    if kind is None:
        kind = next((name for name, suffix in SUFFIXES.items() if out.suffix == suffix), None)
        if kind is None:
            raise EngramError(f"{out} has the ending {out.suffix!r}; formats are {known}.")
    if kind not in SUFFIXES:
        raise EngramError(f"There is no format {kind!r}; formats are {known}.")
    return kind


def _data_of(text: str, tasks: Sequence[str]) -> tuple[str, str]:
    """NAME=DATA, or DATA alone where there is one task."""
    name, equals, spec = text.partition("=")
    if not equals and len(tasks) == 1:
        return tasks[0], text
    if not equals or name not in tasks:
        raise EngramError(
            f"--data {text} is for none of the exported tasks ({', '.join(tasks) or 'none'}); "
            "write --data NAME=DATA."
        )
    return name, spec


def _told(
    model: MemoryViT,
    made: Export,
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
) -> Description:
    document: dict[str, Any] = {
        "file": str(made.path),
        "format": made.format,
        "int8": made.int8,
        "bytes": made.bytes,
        "seconds": round(made.seconds, 2),
        "script": str(made.script) if made.script else None,
        "tasks": {},
    }
    table = []
    for name, change in made.changes.items():
        document["tasks"][name] = {"change": asdict(change)}
        cells = [name, f"{change.largest:.2g}", f"{change.relative:.2%}", f"{change.agreement:.0%}"]
        if name in before:
            document["tasks"][name] |= {"before": before[name], "after": after[name]}
            task = model.task(name).kind
            old, new = before[name][task.score], after[name][task.score]
            cells += [
                f"{before[name]['images']:,}",
                task.title,
                task.shown(old),
                task.shown(new),
                ("-" if new < old else "+") + task.shown(abs(new - old)),
            ]
        elif before:
            cells += [""] * 5
        table.append(tuple(cells))
    kind = f"ONNX, opset {OPSET}" if made.format == "onnx" else "torch.export"
    rows = [
        ("file", str(made.path)),
        ("format", kind + (", int8" if made.int8 else ", float32")),
        ("size", f"{made.bytes / 1e6:,.1f} MB"),
        ("checked", f"against the model, on {sum(_BATCHES)} generated pictures"),
    ]
    if made.format == "onnx":
        rows.append(
            ("script", str(made.script or "predict.py is another file, and was left alone"))
        )
    if made.int8 and not before:
        rows.append(("accuracy", "not measured; give --data NAME=DATA to see what int8 costs"))
    columns: tuple[str, ...] = ("task", "largest difference", "relative", "same best class")
    if before:
        columns += ("images", "metric", "model", "exported", "change")
    return Description(document, rows, columns, tuple(table))
