"""`Kind`: a kind of task, what is learned from, what is answered, and how good an answer is.

Everything that differs between kinds is in a subclass of it in `kinds.py`; other modules ask the
kind and never look at its name. What a model returns for an image (`model(pixels)[task]`) is the
*output*, and `Kind.answer` turns the output of one image into the answer for people and programs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor

from engram.tasks import metrics
from engram.tasks.heads import Fitted, HeadSizes, TaskHead
from engram.tasks.metrics import Pairs

#: The type of a column: "number", "text", "truth", "texts" (a list), "halves" or
#: "floats" (vectors); or the types of the fields of a list of records.
ColumnType: TypeAlias = str | Mapping[str, str]

#: What the classes count for in the loss, as `Kind.class_weights` returns it; None: the same.
Weights: TypeAlias = Tensor | None

#: What `Kind.answer` reads of one image: its output, the class names and the fitted buffers.
Reading: TypeAlias = tuple[Tensor, Sequence[str], Fitted]

IGNORED = 255  # in a batch of masks: a pixel that counts nowhere


class Kind(ABC):
    """One kind of task; there is one object of each, in `KINDS`."""

    name: str
    nouns = ("class", "classes")  # what a task has `len(classes)` of
    columns: tuple[str, ...]  # its metrics in the order of tables, the one that chooses first
    title: str  # what that one is called in a sentence
    class_title = ""  # what `class_scores` are called
    least = 1  # classes
    head_class: type[TaskHead] = TaskHead
    fitted: tuple[str, ...] = ()  # tensors of the head that are found, not trained
    per_pixel = False  # read from the backbone's patches: labels are masks
    balances: tuple[str, ...] = ()  # how classes of unequal size can be balanced
    smooths = True  # whether labels can be smoothed
    mixes = True  # whether two images, and the losses of their labels, can be mixed
    ranked = True  # whether `scores` are listed with the highest first
    calibrates = False  # whether answers have probabilities, which a temperature can calibrate
    one_class = False  # learned from good images alone: labels say 1 for others (one-class)
    picture = ""  # the part of an answer that is a PNG: "mask" or "map"

    def head_macs(self, sizes: HeadSizes, patches: int) -> int:
        """Multiply-accumulates of the head for one picture."""
        return sizes.features * (sizes.classes + (sizes.features if sizes.mlp else 0))

    def groups(self, classes: int) -> int:
        """Number of means in the class statistics: one, unless each image has one class."""
        return 1

    def group(self, labels: Tensor) -> Tensor:
        """Which of them each image belongs to."""
        return torch.zeros(len(labels), dtype=torch.long)

    @property
    def score(self) -> str:
        """The metric that chooses between epochs, settings and seeds: more is better."""
        return self.columns[0]

    def score_with(self, balance: str) -> str:
        """The metric that chooses where training balances the classes."""
        return self.score

    def metric_title(self, metric: str) -> str:
        """The name of a metric in a sentence."""
        return self.title if metric == self.score else metric.replace("_", " ")

    def shown(self, score: float) -> str:
        """The score for people."""
        return metrics.shown(self.score, score)

    # Learning

    def prepare(self, head: TaskHead, labels: npt.NDArray[Any]) -> None:  # noqa: B027
        """Before training: take from the training labels what has to be known of them."""

    @abstractmethod
    def losses(
        self, outputs: Tensor, labels: Tensor, head: TaskHead, smoothing: float, weights: Weights
    ) -> Tensor:
        """The loss of each image."""

    def class_weights(self, labels: npt.NDArray[Any], classes: int) -> Tensor:
        """Weights of the classes in the loss that balance them; 1 in kinds without `balances`."""
        return torch.ones(classes)

    def fit_buffers(self, head: TaskHead, kept: Pairs) -> None:  # noqa: B027
        """After training: take from the answers on the validation split what is found there."""

    def temperature(self, logits: Tensor, labels: Tensor) -> float:
        """The temperature, from what `keep` kept; 1 in kinds without `calibrates`."""
        return 1.0

    # Judging

    def keep(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of `metrics` from a batch, one row a picture, on the CPU."""
        return outputs.float().cpu(), labels

    @abstractmethod
    def metrics(self, kept: Pairs, fitted: Fitted, unreadable: int = 0) -> dict[str, Any]:
        """Metrics of what `keep` kept; `unreadable` images are wrong answers in classification."""

    def class_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The score of every class, from what `keep` kept; NaN for one that does not occur."""
        return torch.full((logits.shape[-1],), math.nan)

    # Answering

    def scores(self, output: Tensor) -> Tensor:
        """Probability of each class (of each pixel), from the output of one image."""
        return output.float().softmax(0)

    def condensed(self, outputs: Tensor) -> Tensor:
        """All that `answer` needs of a batch of outputs, which is less where they are per pixel."""
        return outputs

    def uncertainty(self, outputs: Tensor, fitted: Fitted) -> Tensor | None:
        """Uncertainty of the answers about a batch, from 0 to 1; None if outputs do not tell."""
        return None

    def labels(self, output: Tensor, fitted: Fitted) -> tuple[list[int], float | None]:
        """The classes that the answer for one image names, and the probability of the likeliest."""
        return [], None

    @abstractmethod
    def answer(self, output: Tensor, names: Sequence[str], fitted: Fitted, top_k: int = 5) -> Any:
        """The answer for one image, from its output: values that JSON can hold."""

    def agreement(self, one: Reading, other: Reading) -> float:
        """Agreement of two versions of a task about one image, from 0 to 1."""
        a, b = (self.scores(reading[0]).double() for reading in (one, other))
        if a.shape != b.shape:
            return 0.0
        # 1 minus the difference of numbers, relative to the larger one
        largest = torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(torch.float32).tiny)
        return float((1 - (a - b).abs() / largest).clamp_min(0).mean())

    @abstractmethod
    def words(self, answer: Any) -> str:
        """An answer in a line for people."""

    @abstractmethod
    def table_columns(self, names: Sequence[str]) -> dict[str, ColumnType]:
        """Columns of a table of answers, "" for the task's own and "x" for `TASK.x`."""

    @abstractmethod
    def table_row(self, answer: Any) -> dict[str, Any]:
        """The cells of an answer, by `table_columns`."""
