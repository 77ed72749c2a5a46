"""Run a model that `engram export` wrote on images; it needs only onnxruntime and numpy.

    python predict.py image.ppm array.npy
    python predict.py photo.jpg --task flowers --top-k 5 --json

Binary PPM and PGM files and arrays (.npy; uint8, height x width x 3) are read here; for JPEG, PNG
and others, Pillow is used if it is installed. Images are resized, cropped and normalised as in
training: the file itself says how.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Image: Any = None
with contextlib.suppress(ImportError):  # PPM files and arrays are read without Pillow
    from PIL import Image

MODEL = "model.onnx"
#: The formats that Pillow may open. It knows more, and for some of them it starts other programs.
FORMATS = ("JPEG", "PNG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

LEGEND = "familiarity: 1 is usual, below 0 looks unlike what the task learned from"

Array = np.ndarray[Any, np.dtype[Any]]


class Unusable(Exception):
    """An image, a model or an argument that cannot be used; the message is a sentence."""


# Reading images


def read(path: Path, preprocessing: dict[str, Any]) -> tuple[Array, tuple[int, int]]:
    """The pixels, uint8 (height, width, 3), and the width and height of the file itself."""
    if not path.is_file():
        raise Unusable(f"{path}: the file does not exist")
    try:
        if Image is not None and path.suffix != ".npy":
            Image.init()
            known = [name for name in FORMATS if name in Image.OPEN]
            with Image.open(path, formats=known) as image:
                return decode(image, preprocessing)
        pixels = np.load(path, allow_pickle=False) if path.suffix == ".npy" else read_ppm(path)
    except Unusable:
        raise
    except Exception as error:  # decoders raise many types for bad bytes
        raise Unusable(f"{path}: {error}") from error
    pixels = as_rgb(path, pixels)
    return pixels, (pixels.shape[1], pixels.shape[0])


def as_rgb(path: Path, array: Any) -> Array:
    """An array that a file held, as uint8 (height, width, 3)."""
    if not isinstance(array, np.ndarray):
        raise Unusable(f"{path}: several arrays; expected one")
    pixels: Array = np.stack([array] * 3, axis=-1) if array.ndim == 2 else array
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise Unusable(f"{path}: {pixels.dtype} of {pixels.shape}; expected uint8 of (h, w, 3)")
    return pixels


def read_ppm(path: Path) -> Array:
    """The pixels of a binary PPM or PGM file with 8 bits per value."""
    data = path.read_bytes()
    header = re.match(rb"P([56])" + 3 * rb"(?:\s|#[^\n]*\n)+(\d+)" + rb"\s", data)
    if header is None:
        raise Unusable(f"{path}: neither PPM nor .npy; install Pillow to read other images")
    channels, (width, height, most) = 3 if header[1] == b"6" else 1, map(int, header.groups()[1:])
    count = width * height * channels
    if most != 255 or len(data) - header.end() < count:
        raise Unusable(
            f"{path}: truncated, or not 8 bits per value; install Pillow to read other images"
        )
    flat = np.frombuffer(data, np.uint8, count, header.end())
    return np.repeat(flat.reshape(height, width, channels), 3 // channels, 2)


def decode(image: Any, preprocessing: dict[str, Any]) -> tuple[Array, tuple[int, int]]:
    """An image that Pillow opened, upright and in RGB; a large JPEG at a fraction of its size."""
    orientation = exif_orientation(image)
    width, height = image.size[::-1] if orientation >= 5 else image.size
    left, top, right, bottom = box(width, height, preprocessing)
    high, wide = preprocessing["size"]
    scale = 2 * max(wide / (right - left), high / (bottom - top))
    if scale < 1:
        image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
    image.load()
    if image.mode.startswith("I") or image.mode == "F":  # gray, 16 bits or floats
        gray = gray_in_8_bits(np.asarray(image), 1 if image.mode == "F" else 65535)
        pixels = np.stack([gray] * 3, axis=-1)
    elif image.has_transparency_data:
        white = Image.new("RGB", image.size, "white")
        layer = image.convert("RGBA")
        white.paste(layer, mask=layer.getchannel("A"))
        pixels = np.asarray(white)
    else:
        pixels = np.asarray(image.convert("RGB"))
    return upright(pixels, orientation), (width, height)


def exif_orientation(image: Any) -> int:
    """1 (upright) to 8, as EXIF counts them."""
    if image.format == "TIFF":  # Pillow itself turns those
        return 1
    with contextlib.suppress(Exception):  # the image may be fine although its metadata is broken
        orientation = int(image.getexif().get(0x0112, 1))
        return orientation if 1 <= orientation <= 8 else 1
    return 1


def upright(pixels: Array, orientation: int) -> Array:
    """Turn and mirror pixels as EXIF says."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels


def gray_in_8_bits(values: Array, white: int) -> Array:
    """Gray values from 0 to `white` as uint8."""
    if not (values.min() >= 0 and values.max() <= white):
        raise Unusable(f"gray values from {values.min():g} to {values.max():g}")
    gray = np.empty(values.shape, np.uint8)
    part = 2**16  # values at a time: as doubles, all of them would take 8 bytes each
    for start in range(0, values.size, part):
        some = values.reshape(-1)[start : start + part].astype(np.float64)
        gray.reshape(-1)[start : start + part] = np.rint(some * (255 / white))
    return gray


# Preprocessing


def view(pixels: Array, size: tuple[int, int], preprocessing: dict[str, Any]) -> Array:
    """Resize and centre crop in one step, with exactly the result that Pillow has."""
    width, height = size  # of the file; a JPEG may have been decoded smaller
    left, top, right, bottom = box(width, height, preprocessing)
    x, y = pixels.shape[1] / width, pixels.shape[0] / height
    right, bottom = min(right * x, pixels.shape[1]), min(bottom * y, pixels.shape[0])
    high, wide = preprocessing["size"]
    method = preprocessing["interpolation"]

    def across(rows: Array) -> Array:
        return resample(rows.swapaxes(0, 1), left * x, right, wide, method).swapaxes(0, 1)

    if pixels.shape[0] > 100 * pixels.shape[1] and high < pixels.shape[0]:  # Pillow's own rule
        return across(resample(pixels, top * y, bottom, high, method))
    return resample(across(pixels), top * y, bottom, high, method)


def box(width: int, height: int, preprocessing: dict[str, Any]) -> tuple[float, ...]:
    """The part of an image that the model sees: left, top, right, bottom."""
    if preprocessing["resize"] is None:
        return (0, 0, width, height)
    scale = preprocessing["resize"] / min(width, height)
    wide, high = round(width * scale), round(height * scale)
    crop_high, crop_wide = preprocessing["size"]
    left, top = (wide - crop_wide) // 2, (high - crop_high) // 2
    x, y = width / wide, height / high
    return (left * x, top * y, (left + crop_wide) * x, (top + crop_high) * y)


def bicubic(x: Array) -> Array:
    near = (1.5 * x - 2.5) * x * x + 1
    far = -0.5 * (((x - 5) * x + 8) * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0))


KERNELS: dict[str, tuple[float, Callable[[Array], Array]]] = {  # of |x|, with their radius
    "box": (0.5, lambda x: np.where(x <= 0.5, 1.0, 0.0)),
    "bilinear": (1, lambda x: np.maximum(1 - x, 0)),
    "hamming": (1, lambda x: np.where(x < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0)),
    "bicubic": (2, bicubic),
    "lanczos": (3, lambda x: np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)),
}


def resample(pixels: Array, low: float, high: float, size: int, method: str) -> Array:
    """The rows from `low` to `high` as `size` rows, in Pillow's fixed-point arithmetic."""
    low, high = float(np.float32(low)), float(np.float32(high))
    scale = float(np.float32(high) - np.float32(low)) / size
    if method == "nearest":
        steps = np.full(size, scale)
        steps[0] = low + 0.5 * scale
        return pixels[np.minimum(np.cumsum(steps).astype(np.int64), len(pixels) - 1)]
    radius, kernel = KERNELS[method]
    wide = max(scale, 1.0)
    centre = low + (np.arange(size) + 0.5) * scale
    first = np.maximum((centre - radius * wide + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + radius * wide + 0.5).astype(np.int64), len(pixels))
    rows = first[:, None] + np.arange(int((last - first).max()))  # (size, rows averaged into one)
    weights = kernel(np.abs((rows - centre[:, None] + 0.5) / wide))
    weights = np.where(rows < last[:, None], weights, 0)
    weights /= weights.sum(1, keepdims=True)
    fixed = np.trunc(weights * (1 << 22) + np.copysign(0.5, weights)).astype(np.int64)
    out = np.full((size, *pixels.shape[1:]), 1 << 21, np.int64)
    for part in range(rows.shape[1]):
        out += fixed[:, part, None, None] * pixels[np.minimum(rows[:, part], len(pixels) - 1)]
    rounded: Array = np.clip(out >> 22, 0, 255).astype(np.uint8)
    return rounded


def normalise(views: Array, preprocessing: dict[str, Any]) -> Array:
    """uint8 (images, height, width, 3) to float32 (images, 3, height, width)."""
    scale = np.float32(1) / (np.float32(255) * np.array(preprocessing["std"], np.float32))
    shift = np.array(preprocessing["mean"], np.float32) * np.float32(255) * scale
    return np.ascontiguousarray((views.astype(np.float32) * scale - shift).transpose(0, 3, 1, 2))


# Answers


class Model:
    """An exported file; `about` is its metadata."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise Unusable(f"{path} does not exist; give the exported file with --model.")
        try:
            import onnxruntime
        except ImportError as error:
            raise Unusable(f"onnxruntime is needed: pip install onnxruntime ({error}).") from error
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), providers=["CPUExecutionProvider"]
            )
            metadata = self.session.get_modelmeta().custom_metadata_map
            self.about: dict[str, Any] = json.loads(metadata["engram"])
        except Exception as error:
            raise Unusable(
                f"{path} is not a model that `engram export` wrote ({error})."
            ) from error

    def outputs(self, path: Path, tasks: list[str]) -> tuple[dict[str, Array], dict[str, Any]]:
        """The logits of one image by task, and its familiarity where the file has that."""
        preprocessing = self.about["preprocessing"]
        seen = view(*read(path, preprocessing), preprocessing)
        known = self.about["tasks"]
        familiar = {one: known[one]["familiarity"] for one in tasks if "familiarity" in known[one]}
        names = [*tasks, *familiar.values()]
        found = self.session.run(names, {"pixels": normalise(seen[None], preprocessing)})
        values = {name: value[0] for name, value in zip(names, found, strict=True)}
        likely = {name: float(values[output]) for name, output in familiar.items()}
        familiarity = {n: round(v, 4) if math.isfinite(v) else None for n, v in likely.items()}
        return {name: values[name] for name in tasks}, familiarity

    def answer(self, name: str, logits: Array, top_k: int) -> list[dict[str, Any]]:
        """The answer of `engram predict`, without masks and heat maps: shares and scores only."""
        task = self.about["tasks"][name]
        classes, kind = task["classes"], task["kind"]
        if kind == "anomaly":
            patches = np.sort(logits.ravel())[::-1]
            score = float(patches[: max(1, round(0.01 * len(patches)))].mean())
            (threshold,) = task["thresholds"]
            found = {"score": round(score, 6), "threshold": round(threshold, 6)}
            return [{**found, "anomalous": score > threshold}]
        if kind in ("regression", "embedding"):
            names = classes or [str(i) for i in range(len(logits))]
            pairs = zip(names, logits.tolist(), strict=True)
            return [{"name": one, "value": float(f"{value:.6g}")} for one, value in pairs]
        if kind == "segmentation":
            counts = np.bincount(logits.argmax(0).ravel(), minlength=len(classes))
            what, scores = "share", counts / counts.sum()
            order = np.argsort(-scores, kind="stable")
        else:
            what, order = "probability", np.argsort(-logits, kind="stable")
            odds = np.exp(logits - logits.max())
            scores = odds / odds.sum()
        if kind != "multilabel":
            return [{"class": classes[i], what: round(float(scores[i]), 6)} for i in order[:top_k]]
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
        rows = [
            {
                "class": classes[i],
                "probability": round(float(scores[i]), 6),
                "threshold": round(float(task["thresholds"][i]), 6),
                "present": bool(scores[i] >= task["thresholds"][i]),
            }
            for i in order
        ]  # the most likely labels, and all that reach their threshold
        return [row for i, row in enumerate(rows) if i < top_k or row["present"]]


# The command


def predict(model: Model, path: Path, tasks: list[str], top_k: int) -> dict[str, Any]:
    """The answers about one image, or an error if it cannot be read."""
    try:
        logits, familiarity = model.outputs(path, tasks)
        for name, values in logits.items():
            if not np.isfinite(values).all():
                raise Unusable(f"{path}: the output of {name!r} is not finite")
    except Unusable as error:
        return {"image": str(path), "error": str(error)}
    answers = {name: model.answer(name, values, top_k) for name, values in logits.items()}
    known = {"familiarity": familiarity} if familiarity else {}
    return {"image": str(path), "tasks": answers, **known}


def in_words(one: dict[str, Any]) -> str:
    """One row of an answer as text."""
    if "anomalous" in one:
        what = "anomalous" if one["anomalous"] else "good"
        return f"{what}: score {one['score']:.3f}, threshold {one['threshold']:.3f}"
    if "value" in one:
        return f"{one['name']} {one['value']:.5g}"
    text = f"{one['class']} {one.get('probability', one.get('share')):.1%}"
    return text if one.get("present", True) else f"not {text}"


def visible(text: str) -> str:
    """Names that a terminal shows and does not obey, whatever is in them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run an exported model on images.")
    add, own = parser.add_argument, Path(__file__).with_name(MODEL)
    add("images", nargs="+", type=Path, metavar="IMAGE")
    add("--model", type=Path, default=own, help="the exported file")
    add("--task", action="append", metavar="NAME", help="run only this task; repeatable")
    add("--top-k", type=int, default=3, help="number of classes to return per task")
    add("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    try:
        if options.top_k < 1:
            raise Unusable(f"--top-k is {options.top_k}; it must be at least 1.")
        model = Model(options.model)
        tasks = options.task or list(model.about["tasks"])
        for name in set(tasks) - set(model.about["tasks"]):
            known = ", ".join(model.about["tasks"])
            raise Unusable(f"There is no task {name!r}; this model has {known}.")
    except Unusable as error:
        print(visible(str(error)), file=sys.stderr)
        return 2
    results = [predict(model, path, tasks, options.top_k) for path in options.images]
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for result in results:
            print(visible(result.get("error") or result["image"]))
            for name, best in result.get("tasks", {}).items():
                familiarity = result.get("familiarity", {}).get(name)
                known = "" if familiarity is None else f" (familiarity {familiarity:.2f})"
                print(visible(f"  {name}: {', '.join(map(in_words, best)) or 'none'}{known}"))
        if any("familiarity" in result for result in results):
            print(LEGEND)
    return 2 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
