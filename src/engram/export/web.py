"""A model as a folder of static files that runs all its tasks in a browser.

The page in `page/` prepares images as Engram does and runs an ONNX file with onnxruntime-web. It
sends nothing anywhere, and works without a network once it was loaded.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram.errors import EngramError, flag
from engram.export.verify import Difference
from engram.export.write import check_exportable, metadata, onnx_file
from engram.model import MemoryViT
from engram.util.documents import load_json
from engram.util.files import check_renamable, make_folder, replaced_folder
from engram.util.templates import page_files, render

#: The version of onnxruntime-web that the page was tested with.
RUNTIME = "1.30.0"
_ADDRESS = f"https://cdn.jsdelivr.net/npm/onnxruntime-web@{RUNTIME}/dist/"
_WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
_WEBGPU = (
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)
WEIGHTS = ("float16", "int8", "float32")
_SETTINGS = "/* replaced by the export */ "


@dataclass(frozen=True)
class WebExport:
    """A folder of static files that was written.

    Attributes:
        folder: The folder.
        model: Its ONNX file.
        weights: How the weights of the linear layers are stored: `float16`, `int8`, `float32`.
        model_bytes: The size of its model.
        bytes: The size of all its files.
        runtime: Where onnxruntime-web comes from: copied files, or an address.
        seconds: How long the export took.
        differences: By output, how it differs from the model's on generated images.
    """

    folder: Path
    model: Path
    weights: str
    model_bytes: int
    bytes: int
    runtime: str
    seconds: float
    differences: Mapping[str, Difference]


def export_web(
    model: MemoryViT,
    folder: str | Path,
    *,
    weights: str = "float16",
    tasks: Sequence[str] | None = None,
    runtime: str | Path | None = None,
    overwrite: bool = False,
) -> WebExport:
    """Write a model as static files that answer all its tasks in a browser.

    The ONNX file in it is run and compared with the model before anything is written.

    Args:
        model: The model to export, in float32.
        folder: The folder to write.
        weights: How the weights of the linear layers are stored: `float16`, half of the size;
            `int8`, a quarter, and less exact; or `float32`, with which the page uses WebGPU where
            there is one.
        tasks: The tasks to include; "base" is the backbone's own head. By default all of them.
        runtime: The npm package onnxruntime-web, as a folder or as the .tgz of `npm pack`, from
            which the files of the runtime are copied. By default the page loads them from
            cdn.jsdelivr.net, by version.
        overwrite: Replace a folder that an earlier export wrote.

    Returns:
        What was written.

    Raises:
        EngramError: The model cannot be exported, the runtime's files are not there, or the folder
            cannot be written.

    Examples:
        >>> made = engram.export.export_web(model, "site")
        >>> made.folder.joinpath("index.html").is_file()
        True
    """
    if weights not in WEIGHTS:
        raise EngramError(f"weights is {weights!r}; it can be {', '.join(WEIGHTS)}.")
    began, folder = time.monotonic(), Path(folder)
    check_site_folder(folder, overwrite)
    webgpu = weights == "float32"
    wanted = (*_WASM, *_WEBGPU) if webgpu else _WASM
    copied = {} if runtime is None else _runtime_files(Path(runtime), wanted)
    names = check_exportable(model, tasks)
    precision = weights if webgpu else f"{weights} weights"
    data, differences = onnx_file(model, names, precision, f"{folder} was not written")
    files = _site_files(metadata(model, names, precision), data, copied, webgpu=webgpu)
    with replaced_folder(folder) as building:
        for name, content in files.items():
            make_folder((building / name).parent)
            (building / name).write_bytes(content)
    total = sum(map(len, files.values()))
    where = f"copied from {runtime}" if runtime else f"loaded from {_ADDRESS}"
    path = folder / next(name for name in files if name.endswith(".onnx"))
    seconds = time.monotonic() - began
    return WebExport(folder, path, weights, len(data), total, where, seconds, differences)


def check_site_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that has anything but an earlier export in it, before any work is done."""
    check_renamable(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise EngramError(f"{folder} is a file; {flag('web')} names a folder.")
    try:
        written = "engram_site" in load_json((folder / "model.json").read_bytes())
    except (OSError, ValueError, TypeError):
        written = False
    if not written:
        raise EngramError(f"The folder {folder} has other files; choose another {flag('web')}.")
    if not overwrite:
        raise EngramError(
            f"{folder} already exists; choose another {flag('web')}, or replace it with "
            f"{flag('overwrite', True)}."
        )


def _runtime_files(package: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files of the npm package onnxruntime-web: its folder, its dist/, or its .tgz."""
    try:
        if package.is_dir():
            dist = package / "dist" if (package / "dist").is_dir() else package
            return {name: (dist / name).read_bytes() for name in names}
        with tarfile.open(package) as archive:
            members = [archive.extractfile(f"package/dist/{name}") for name in names]
            return {n: m.read() for n, m in zip(names, members, strict=True) if m is not None}
    except (OSError, KeyError, tarfile.TarError) as error:
        raise EngramError(
            f"{package} is not the npm package onnxruntime-web, version {RUNTIME} ({error}); get "
            f"it with npm pack onnxruntime-web@{RUNTIME}, and give {flag('runtime')} the .tgz."
        ) from None


def _site_files(
    about: Mapping[str, object], model: bytes, copied: Mapping[str, bytes], *, webgpu: bool
) -> dict[str, bytes]:
    """The files of the folder by name. All that can change has the content in its name or version.

    Names of tasks and classes are in model.json alone, which the page shows as text.
    """
    elsewhere = "" if copied else f" {_ADDRESS}"
    policy = (
        f"default-src 'none'; script-src 'self' 'wasm-unsafe-eval'{elsewhere}; "
        f"connect-src 'self'{elsewhere}; worker-src 'self' blob:; style-src 'self'; "
        "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'"
    )
    files = page_files("engram.export")
    worker = files.pop("sw.js").decode()
    files["index.html"] = render("engram.export", "index.html.j2", policy=policy).encode()
    shell = ["./", *files, "model.json"]
    files |= {f"runtime/{name}": data for name, data in copied.items()}
    name = f"model-{hashlib.sha256(model).hexdigest()[:12]}.onnx"
    files[name] = model
    site = {
        "engram_site": 1,
        "model": name,
        "bytes": len(model),
        "runtime": {
            "address": "runtime/" if copied else _ADDRESS,
            "copied": bool(copied),
            "webgpu": webgpu,
        },
        "about": about,
    }
    files["model.json"] = json.dumps(site).encode()
    content = hashlib.sha256(b"".join(hashlib.sha256(files[n]).digest() for n in sorted(files)))
    settings = {
        "version": content.hexdigest()[:12],
        "shell": shell,
        "runtime": elsewhere.strip(),
        "policy": policy,
    }
    before, _, rest = worker.partition(_SETTINGS)
    after = rest.partition(";\n")[2]
    files["sw.js"] = f"{before}{json.dumps(settings)};\n{after}".encode()
    return files
