"""Predictions: the answer of every task about images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engram.errors import EngramError, flag
from engram.images.decode import BadImage
from engram.images.inputs import ImageInput, decodable, each_image, image_name, is_one_image
from engram.images.views import evaluation_view
from engram.inference.engine import Engine, TorchEngine, familiarity_name, on_cpu, stack_views
from engram.model import MemoryViT
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, counter, silent


def predict(
    model: MemoryViT,
    images: ImageInput | Iterable[ImageInput],
    *,
    tasks: Sequence[str] | None = None,
    top_k: int = 5,
    batch: int = 32,
    exact: bool = False,
    device: str = "auto",
    precision: str = "fp32",
    engine: Engine | None = None,
    processes: ProcessGroup | None = None,
    progress: Progress = silent,
) -> Any:
    """Answer every task for an image, or for a list of images.

    Under torchrun every process takes its share and all get the same result.

    Args:
        model: The model.
        images: A path, an image of Pillow, an array or a tensor; or a list or another iterable of
            these; or a batch as one array or tensor with four axes. Arrays are (height, width) or
            (height, width, 3), tensors (height, width) or (3, height, width). Both hold integers
            from 0 to 255, or floats from 0 to 1, and are not normalised.
        tasks: The tasks to answer; `"base"` is the backbone's own head. By default all tasks, and
            without any `"base"`.
        top_k: Number of classes to return per task.
        batch: Images in a batch.
        exact: Make every answer bit for bit what it would be without the other tasks.
        device: Where to compute: `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.
        precision: `fp32`, or `bf16` or `fp16`, whose answers differ a little.
        engine: What computes the outputs in the model's place: a graph of it, for example.
        processes: Those that share the work, and their device. By default those of torchrun.
        progress: Called as progress(what, done, total, note) while work goes on.

    Returns:
        A list with an answer for each image, or only the answer if a single image was given:
        `{"image", "tasks": {name: [{"class", "probability"}, …]}}`. Other kinds of task than
        classification have their own form in place of the list. Tasks that keep statistics of
        their training images add `"familiarity": {name: number}`, how much the image is like those:
        1 is usual, and below 0 it is less like them than 95 % of validation images. An image that
        cannot be read has `"error"`, a sentence, in place of `"tasks"`. If the output of a task is
        not finite, `"error"` says so, and `"tasks"` has the others. `"image"` is the path, or
        `images[3]` for the fourth of the list if that has no path.

    Raises:
        EngramError: A task is not attached, `top_k` is less than 1, or an object is no image.

    Examples:
        >>> answer = engram.predict(model, "photos/test/rose/0.png", top_k=1)
        >>> list(answer["tasks"])
        ['flowers']
        >>> answers = engram.predict(model, [torch.rand(3, 48, 64), "photos/test/rose/0.png"])
        >>> [answer["image"] for answer in answers]
        ['images[0]', 'photos/test/rose/0.png']
    """
    if top_k < 1:
        raise EngramError(f"{flag('top_k')} is {top_k}; ask for at least 1 class.")
    if is_one_image(images):
        named = [(image_name(images, "the image"), images)]
    else:
        listed = enumerate(each_image(images))
        named = [(image_name(image, f"images[{i}]"), image) for i, image in listed]
    processes = processes or ProcessGroup(device)
    engine = engine or TorchEngine(model, exact, processes.device, precision)
    names = answered_names(model, tasks)
    results: list[dict[str, Any]] = []
    shard = named[processes.rank :: processes.world]
    count = counter(progress, "predicting", len(shard))
    for start in range(0, len(shard), batch):
        views, good = [], []
        for name, image in shard[start : start + batch]:
            results.append({"image": name})
            try:
                view = evaluation_view(decodable(image, name), model.preprocessing, name=name)
                views.append(torch.from_numpy(view))
                good.append(results[-1])
            except BadImage as error:
                results[-1]["error"] = str(error)
        if views:
            pixels = stack_views(views, model.preprocessing, processes.device)
            outputs = on_cpu(engine.run(pixels, names, familiarity=True))
            found = results_about(model, [one["image"] for one in good], outputs, top_k)
            for result, answer in zip(good, found, strict=True):
                result |= answer
        count(batch)
    shards = processes.gather([results])
    answers = [shards[i % processes.world][i // processes.world] for i in range(len(named))]
    return answers[0] if is_one_image(images) else answers


def answered_names(model: MemoryViT, tasks: Sequence[str] | None) -> list[str]:
    """The tasks that answer: those asked for, or all; the backbone itself only where asked for.

    A backbone whose head gives an embedding has no classifier.
    """
    names = model.output_names(list(model.tasks) or None if tasks is None else tasks)
    without = [name for name in names if not model.task(name).spec.classes]
    if without:
        raise EngramError(
            f"The backbone {model.backbone.source} has no classifier, so {without[0]!r} answers "
            "with no classes; ask for tasks. Its embedding is model(pixels)['base']."
        )
    return names


def results_about(
    model: MemoryViT, images: Sequence[str], outputs: Mapping[str, Tensor], top_k: int
) -> list[dict[str, Any]]:
    """The answers about a batch of images with these names, as `predict` gives them."""
    names = [name for name in outputs if ":" not in name]  # the others are familiarity
    familiarity = {n: outputs[f] for n in names if (f := familiarity_name(n)) in outputs}
    results: list[dict[str, Any]] = []
    for i, image in enumerate(images):
        answers, problem = answers_about(model, {name: outputs[name][i] for name in names}, top_k)
        results.append({"image": image, "tasks": answers})
        if familiarity:
            known = {name: shown_familiarity(values[i]) for name, values in familiarity.items()}
            results[-1]["familiarity"] = known
        if problem:
            results[-1]["error"] = f"{image}: {problem}"
    return results


def answers_about(
    model: MemoryViT, outputs: Mapping[str, Tensor], top_k: int
) -> tuple[dict[str, Any], str]:
    """The answers about one image by task, and what is wrong: an output that is not finite."""
    answers, problem = {}, ""
    for name, output in outputs.items():
        if bool(output.isfinite().all()):
            answers[name] = model.task(name).answer(output, top_k)
        else:
            problem = f"the output of {name!r} is not finite; train the task again"
    return answers, problem


def shown_familiarity(familiarity: Tensor) -> float | None:
    """Familiarity as JSON has it: null, if it is not finite."""
    return round(float(familiarity), 4) if bool(familiarity.isfinite()) else None
