"""Words as classes: a task whose head is made of texts, without an image (`fit --words`).

The head's weights are the embeddings of the texts, times the scale that the model was trained with,
and its bias is the model's. So its outputs are the logits of zero-shot classification. `fit` then
teaches it from images, if there are some: it stays as near to the words as held-out images say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from engram.backbones.text_tower import TextTower
from engram.errors import EngramError
from engram.methods import CosineHead
from engram.model import MemoryViT
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task
from engram.util.text import join_names

Words = Mapping[str, Sequence[str]]  # by class, its texts


def add_words(
    model: MemoryViT,
    name: str,
    words: Words,
    *,
    kind: str = "classification",
    tower: TextTower | None = None,
) -> Task:
    """Add a task whose classes are words; the backbone is a CLIP, SigLIP or SigLIP 2.

    Several texts of one class are averaged, each as a vector of length 1.

    Args:
        model: The model.
        name: The name of the new task.
        words: By class, one or more texts, such as "a photo of a cat".
        kind: `classification`, or with a SigLIP `multilabel`: the probability of each class by
            itself, as a SigLIP is trained to give it.
        tower: The text tower, if it is not in the folder or repository of the backbone.

    Returns:
        The task, which answers at once. `engram.fit` teaches it from images.

    Raises:
        EngramError: The backbone has no text tower, or the words make no such task.
    """
    empty = [label for label, texts in words.items() if not texts]
    if not words or empty:
        raise EngramError(f"There are no words for {join_names(empty) or 'any class'}.")
    tower = tower or TextTower(model.backbone.source)
    if kind != "classification" and not (kind == "multilabel" and tower.by_itself):
        raise EngramError(
            f"Words make no task of {kind} with this backbone: a CLIP compares classes with each "
            "other (classification), and a SigLIP also knows the probability of each class by "
            "itself (multilabel)."
        )
    task = model.add(TaskSpec.create(name, list(words), CosineHead.of(model.backbone), kind=kind))
    vectors = tower.embed([text for texts in words.values() for text in texts])
    if vectors.shape[1] != task.head.in_features:
        model.detach(name)
        raise EngramError(
            f"Texts have {vectors.shape[1]} numbers and images {task.head.in_features}; the text "
            "tower is that of another model."
        )
    counts = [len(texts) for texts in words.values()]
    means = [part.mean(0) for part in torch.split(vectors, counts)]
    with torch.no_grad():
        task.head.weight.copy_(tower.scale * F.normalize(torch.stack(means), dim=-1))
        task.head.bias.fill_(tower.bias)
    return task


def parse_words(text: str) -> dict[str, list[str]]:
    """Texts by class, from "TEXT=CLASS, TEXT=CLASS" or a file with such lines.

    A text alone is its own class.
    """
    path = Path(text)
    try:
        is_file = path.is_file()
        parts = path.read_text(encoding="utf-8").splitlines() if is_file else text.split(",")
    except (OSError, ValueError) as error:  # a text may be too long for a path
        if isinstance(error, UnicodeDecodeError):
            raise EngramError(f"{text} is not a text file in UTF-8.") from None
        parts = text.split(",")
    words: dict[str, list[str]] = {}
    for part in filter(None, map(str.strip, parts)):
        prompt, separator, label = (piece.strip() for piece in part.rpartition("="))
        prompt, label = (prompt, label) if separator else (label, label)
        if not prompt or not label:
            raise EngramError(f"{part!r} is no TEXT=CLASS; write a text, or a text and its class.")
        words.setdefault(label, []).append(prompt)
    if not words:
        raise EngramError('There are no words; give "a photo of a cat=cat, a photo of a dog=dog".')
    return words


def words_of(classes: Sequence[str], words: Words) -> dict[str, Sequence[str]]:
    """The words of these classes, in their order; the two must name the same classes."""
    missing = [label for label in classes if label not in words]
    others = [label for label in words if label not in classes]
    if missing or others:
        what = f"no words for {join_names(missing)}" if missing else ""
        more = f"words for {join_names(others)}, of which there are no images" if others else ""
        raise EngramError(
            f"There are {' and '.join(filter(None, (what, more)))}; words and images have to be of "
            "the same classes."
        )
    return {label: words[label] for label in classes}
