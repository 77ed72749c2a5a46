"""Answers in the form of transformers' pipelines: lists of `{"label", "score"}`, or of masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from engram.errors import EngramError
from engram.images.decode import BadImage, ImageSource, image_size, read_encoded
from engram.images.inputs import (
    ImageInput,
    as_array,
    decodable,
    each_image,
    image_name,
    is_one_image,
)
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_box, evaluation_view
from engram.inference.engine import TorchEngine, on_cpu, stack_views
from engram.inference.predict import answered_names
from engram.model import MemoryViT
from engram.util.hub import PathOrHubId
from engram.util.processes import ProcessGroup
from engram.vit import ViT

_SECONDS = 60  # without an answer


def pipeline(
    model: MemoryViT | PathOrHubId,
    *,
    task: str | Sequence[str] | None = None,
    top_k: int | None = 5,
    batch_size: int = 1,
    device: str = "auto",
    backbone: ViT | PathOrHubId | None = None,
) -> Pipeline:
    """A bundle as a function of images, which answers in the form of transformers' pipelines.

    Args:
        model: A bundle or an engram, as `MemoryViT.from_pretrained` takes it, or a model.
        task: The task to answer, or several; `"base"` is the backbone's own head. By default all
            tasks that are attached, or `"base"` if there are none.
        top_k: Number of classes to return. None returns all.
        batch_size: Images in a batch. The first answer comes when its batch is full.
        device: Where to compute: `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.
        backbone: The backbone, or its path or Hub id, if it is not where the bundle says.

    Returns:
        A function. It takes a path, an `http://` or `https://` URL, an image of Pillow, an array
        or a tensor, and gives the answer for it: `[{"label", "score"}, …]`, the highest score
        first. The scores of a multilabel task are independent of each other; those of a regression
        are its numbers, in their order. Segmentation gives `[{"score": None, "label", "mask"}, …]`
        for each class that occurs: the mask is an image of Pillow, 255 where the class is, of the
        size of the image. What the preprocessing cuts off at the border is in no mask. Several
        tasks are answered by name: `{"flowers": […], "roses": […]}`. A list of images gives a list
        of answers, and a generator or dataset an iterator that reads on as it is asked. `task`,
        `top_k` and `batch_size` can also be given to the call.

    Raises:
        EngramError: There is no such bundle or task; when it is called, an image cannot be read.

    Examples:
        >>> classify = engram.pipeline("flowers.safetensors")
        >>> answer = classify("photos/test/rose/0.png")
        >>> sorted(answer[0])
        ['label', 'score']
        >>> len(classify(["photos/test/rose/0.png", torch.rand(3, 48, 64)], top_k=1))
        2
    """
    if not isinstance(model, MemoryViT):
        model = MemoryViT.from_pretrained(model, backbone=backbone)
    elif backbone is not None:
        raise EngramError(
            "backbone is given together with a model, which has its own; leave it out."
        )
    engine = TorchEngine(model, device=ProcessGroup(device).device)
    return Pipeline(engine, task, top_k, batch_size)


@dataclass(frozen=True)
class Pipeline:
    """A bundle as a function of images, with these options unless a call has others."""

    engine: TorchEngine
    task: str | Sequence[str] | None
    top_k: int | None
    batch_size: int

    def __post_init__(self) -> None:
        for name in ("top_k", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngramError(f"{name} is {value}; give at least 1.")
        self._names()

    @property
    def model(self) -> MemoryViT:
        """The model that answers."""
        return self.engine.model

    def _names(self) -> list[str]:
        tasks = [self.task] if isinstance(self.task, str) else self.task
        return answered_names(self.model, tasks or None)

    def __call__(self, images: ImageInput | Iterable[ImageInput], **changed: Any) -> Any:
        """The answer for an image, a list of answers for a list, an iterator for an iterable."""
        known = [item.name for item in fields(self)[1:]]
        if wrong := changed.keys() - set(known):
            raise EngramError(
                f"A pipeline does not take {min(wrong)}; it takes {', '.join(known)}."
            )
        own = replace(self, **changed)
        if is_one_image(images):
            return next(own._answers(iter([images])))
        answers = own._answers(each_image(images))
        is_list = isinstance(images, (list, tuple)) or as_array(images) is not None
        return list(answers) if is_list else answers

    def _answers(self, images: Iterator[ImageInput]) -> Iterator[Any]:
        preprocessing, names = self.model.preprocessing, self._names()
        one_alone = len(names) == 1 and (self.task is None or isinstance(self.task, str))
        numbered = enumerate(images)
        while some := list(islice(numbered, self.batch_size)):
            sources = [_source(image, i) for i, image in some]
            views = [
                torch.from_numpy(evaluation_view(source, preprocessing, name=name))
                for name, source in sources
            ]
            pixels = stack_views(views, preprocessing, self.engine.device)
            outputs = on_cpu(self.engine.run(pixels, names))
            for row, (image, source) in enumerate(sources):
                answers = {}
                for name in names:
                    output = outputs[name][row]
                    if not output.isfinite().all():
                        raise EngramError(
                            f"{image}: the output of {name!r} is not finite; train the task again."
                        )
                    answers[name] = self._answer(name, output, source)
                yield answers[names[0]] if one_alone else answers

    def _answer(self, name: str, output: Tensor, source: ImageSource) -> list[dict[str, Any]]:
        """The answer of a task about one image, from its row of the outputs."""
        model, kind = self.model, self.model.task(name).kind
        labels = model.task(name).spec.classes
        if kind.per_pixel:
            classes = _on_image(output, image_size(source), model.preprocessing)
            masks = {c: np.uint8(255) * (classes == c) for c in np.unique(classes) if c >= 0}
            return [
                {"score": None, "label": labels[c], "mask": Image.fromarray(mask)}
                for c, mask in masks.items()
            ]
        scores = kind.scores(output)
        order: Sequence[int] = range(len(labels))
        if kind.ranked:
            order = scores.argsort(descending=True, stable=True)[: self.top_k].tolist()
        return [{"label": labels[i], "score": scores[i].item()} for i in order]


def _source(image: ImageInput, i: int) -> tuple[str, ImageSource]:
    """The name of an image for errors, and what to decode."""
    name = image_name(image, f"images[{i}]")
    if not isinstance(image, str) or not image.startswith(("http://", "https://")):
        return name, decodable(image, name)
    try:
        with urlopen(image, timeout=_SECONDS) as response:
            return name, read_encoded(response, image)
    except (OSError, ValueError) as error:
        raise BadImage(f"{image}: it cannot be downloaded ({error})") from error


def _on_image(
    output: Tensor, size: tuple[int, int], preprocessing: Preprocessing
) -> npt.NDArray[np.int64]:
    """The class of every pixel of an image of this (width, height); -1 where it was cut off.

    Logits are resized as transformers does, but class by class: there may be hundreds of them.
    """
    width, height = size
    left, top, right, bottom = map(round, evaluation_box(width, height, preprocessing))
    left, top, right, bottom = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
    best, classes = None, torch.zeros(bottom - top, right - left, dtype=torch.long)
    for c, logits in enumerate(output):
        resized = F.interpolate(logits[None, None], classes.shape, mode="bilinear")[0, 0]
        if best is not None:
            classes[resized > best] = c
            resized = torch.maximum(best, resized)
        best = resized
    whole = np.full((height, width), -1, dtype=np.int64)
    whole[top:bottom, left:right] = classes.numpy()
    return whole
