"""The kinds of task, one object each in `KINDS`.

    classification   one class per image          multilabel     any number of classes per image
    regression       numbers                      segmentation   one class per pixel
    anomaly          good, or not; and where

Their outputs are

    classification, multilabel   logits (classes)
    regression                   the numbers, in the units of the labels
    segmentation                 logits (classes, height, width), at the size of the pixels
    anomaly                      distances of the patches to those of good images (rows, columns)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.errors import EngramError
from engram.tasks import metrics
from engram.tasks.heads import BankHead, Fitted, HeadSizes, MaskHead, NumberHead, TaskHead
from engram.tasks.kind import IGNORED, ColumnType, Kind, Reading, Weights
from engram.tasks.metrics import Pairs
from engram.util.tensors import to_device


class Classification(Kind):
    name = "classification"
    columns = ("accuracy", "balanced_accuracy", "top5", "macro_f1", "ece", "loss")
    title = "accuracy"
    class_title = "accuracy"
    balances = ("weights", "sampler")
    calibrates = True

    def groups(self, classes: int) -> int:
        return classes

    def group(self, labels: Tensor) -> Tensor:
        return labels

    def score_with(self, balance: str) -> str:
        return self.score if balance == "none" else "balanced_accuracy"

    def losses(
        self, outputs: Tensor, labels: Tensor, head: TaskHead, smoothing: float, weights: Weights
    ) -> Tensor:
        lost = F.cross_entropy(outputs.float(), labels, reduction="none", label_smoothing=smoothing)
        return lost if weights is None else lost * weights[labels]

    def class_weights(self, labels: npt.NDArray[Any], classes: int) -> Tensor:
        """The mean over the images is 1, and every class that occurs has the same sum."""
        counts = torch.from_numpy(np.bincount(labels, minlength=classes)).float()
        return torch.where(counts > 0, len(labels) / (counts > 0).sum() / counts, 0.0)

    def temperature(self, logits: Tensor, labels: Tensor) -> float:
        return metrics.temperature(logits, labels)

    def metrics(self, kept: Pairs, fitted: Fitted, unreadable: int = 0) -> dict[str, Any]:
        return metrics.classification_metrics(kept, unreadable)

    def class_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        right, classes = logits.argmax(1) == labels, logits.shape[1]
        hits = torch.bincount(labels[right], minlength=classes)
        return hits / torch.bincount(labels, minlength=classes)

    def uncertainty(self, outputs: Tensor, fitted: Fitted) -> Tensor | None:
        return _margin_uncertainty(outputs)

    def labels(self, output: Tensor, fitted: Fitted) -> tuple[list[int], float | None]:
        logits = output.float().numpy(force=True)
        best = int(logits.argmax())
        return [best], float(1 / np.exp(logits - logits[best]).sum())

    def answer(self, output: Tensor, names: Sequence[str], fitted: Fitted, top_k: int = 5) -> Any:
        """The `top_k` likeliest: [{"class", "probability"}, …]."""
        best = self.scores(output).topk(min(top_k, len(names)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"class": names[i], "probability": round(p, 6)} for i, p in pairs]

    def agreement(self, one: Reading, other: Reading) -> float:
        """Whether the likeliest class is the same."""
        first, second = (self.answer(*reading, top_k=1)[0]["class"] for reading in (one, other))
        return float(first == second)

    def words(self, answer: Any) -> str:
        return ", ".join(f"{one['class']} {one['probability']:.1%}" for one in answer)

    def table_columns(self, names: Sequence[str]) -> dict[str, ColumnType]:
        top = {"class": "text", "probability": "number"}
        return {"": "text", "probability": "number", "top": top}

    def table_row(self, answer: Any) -> dict[str, Any]:
        """The likeliest class, its probability, and the likeliest `top_k`."""
        return {"": answer[0]["class"], "probability": answer[0]["probability"], "top": answer}


class Multilabel(Kind):
    name = "multilabel"
    columns = ("map", "macro_f1", "micro_f1", "ece", "loss")
    title = "mean average precision"
    class_title = "average precision"
    fitted = ("thresholds",)
    balances = ("weights",)
    calibrates = True

    def losses(
        self, outputs: Tensor, labels: Tensor, head: TaskHead, smoothing: float, weights: Weights
    ) -> Tensor:
        """Binary cross-entropy of each class, averaged over the classes."""
        target = labels.float() * (1 - smoothing) + 0.5 * smoothing
        lost = F.binary_cross_entropy_with_logits(
            outputs.float(), target, reduction="none", pos_weight=weights
        )
        return lost.mean(1)

    def class_weights(self, labels: npt.NDArray[Any], classes: int) -> Tensor:
        """Weight of an image that has a class, by class: together as much as all that have not."""
        having = torch.from_numpy(np.asarray(labels, dtype=np.float64).sum(0)).float()
        return torch.where(having > 0, (len(labels) - having) / having, 1.0).clamp(min=1e-3)

    def fit_buffers(self, head: TaskHead, kept: Pairs) -> None:
        if len(kept[1]):
            thresholds = head.fitted["thresholds"]
            thresholds.copy_(metrics.best_thresholds(*kept).to(thresholds.dtype))

    def temperature(self, logits: Tensor, labels: Tensor) -> float:
        """One for the sigmoids of all classes: a rare class has too few images for its own."""
        return metrics.temperature(*metrics.as_pairs(logits, labels))

    def metrics(self, kept: Pairs, fitted: Fitted, unreadable: int = 0) -> dict[str, Any]:
        return metrics.multilabel_metrics(kept, fitted["thresholds"].float().cpu())

    def class_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        return metrics.average_precision(logits, labels).where(labels.bool().any(0), math.nan)

    def scores(self, output: Tensor) -> Tensor:
        return output.float().sigmoid()

    def uncertainty(self, outputs: Tensor, fitted: Fitted) -> Tensor | None:
        """Mean over the classes of 1 at the threshold and 0 where the answer is sure."""
        probability = self.scores(outputs)
        threshold = fitted["thresholds"].to(probability).clamp(1e-6, 1 - 1e-6)
        below, above = probability / threshold, (1 - probability) / (1 - threshold)
        return torch.minimum(below, above).mean(1)

    def labels(self, output: Tensor, fitted: Fitted) -> tuple[list[int], float | None]:
        probability = self.scores(output)
        present = probability >= fitted["thresholds"].to(probability)
        return present.nonzero()[:, 0].tolist(), float(probability.max())

    def answer(self, output: Tensor, names: Sequence[str], fitted: Fitted, top_k: int = 5) -> Any:
        """[{"class", "probability", "threshold", "present"}, …]: all present, and up to `top_k`."""
        probability = self.scores(output)
        thresholds = fitted["thresholds"].to(probability)
        rows = [
            {
                "class": names[i],
                "probability": round(float(probability[i]), 6),
                "threshold": round(float(thresholds[i]), 6),
                "present": bool(probability[i] >= thresholds[i]),
            }
            for i in probability.argsort(descending=True).tolist()
        ]
        return [row for i, row in enumerate(rows) if i < top_k or row["present"]]

    def agreement(self, one: Reading, other: Reading) -> float:
        """The share of the classes present in either that are present in both; 1 for no class."""
        rows = (self.answer(*reading, top_k=0) for reading in (one, other))
        first, second = ({row["class"] for row in own} for own in rows)
        return len(first & second) / len(first | second) if first | second else 1.0

    def words(self, answer: Any) -> str:
        present = [f"{one['class']} {one['probability']:.1%}" for one in answer if one["present"]]
        return ", ".join(present) or "none"

    def table_columns(self, names: Sequence[str]) -> dict[str, ColumnType]:
        numbers = dict.fromkeys(("probability", "threshold"), "number")
        return {"": "texts", "top": {"class": "text", **numbers, "present": "truth"}}

    def table_row(self, answer: Any) -> dict[str, Any]:
        """The classes that are present, and the whole answer."""
        return {"": [one["class"] for one in answer if one["present"]], "top": answer}


class Regression(Kind):
    name = "regression"
    nouns = ("number", "numbers")
    columns = ("r2", "mae", "rmse", "loss")
    title = "R²"
    class_title = "R²"
    head_class = NumberHead
    fitted = ("mean", "std")
    smooths = False
    ranked = False

    def prepare(self, head: TaskHead, labels: npt.NDArray[Any]) -> None:
        labels = labels.astype(np.float64)  # a million single ones do not add up
        std = np.where(labels.max(0) > labels.min(0), labels.std(0), 1.0)
        for name, found in (("mean", labels.mean(0)), ("std", std)):
            kept = head.fitted[name]
            kept.copy_(torch.from_numpy(found).to(kept.dtype))  # some devices have no float64

    def losses(
        self, outputs: Tensor, labels: Tensor, head: TaskHead, smoothing: float, weights: Weights
    ) -> Tensor:
        """Squared errors of the standardised numbers, averaged over the numbers."""
        error = (outputs.float() - labels.float()) / head.fitted["std"].float()
        return error.square().mean(1)

    def metrics(self, kept: Pairs, fitted: Fitted, unreadable: int = 0) -> dict[str, Any]:
        return metrics.regression_metrics(kept, fitted["std"].cpu().double())

    def class_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        return metrics.r_squared(logits.double(), labels.double())

    def scores(self, output: Tensor) -> Tensor:
        """The numbers themselves, in the units of the labels."""
        return output.float()

    def answer(self, output: Tensor, names: Sequence[str], fitted: Fitted, top_k: int = 5) -> Any:
        """[{"name", "value"}, …], all of them, in the units of the labels."""
        values = self.scores(output).tolist()
        return [{"name": n, "value": float(f"{v:.6g}")} for n, v in zip(names, values, strict=True)]

    def words(self, answer: Any) -> str:
        return ", ".join(f"{one['name']} {one['value']:.5g}" for one in answer)

    def table_columns(self, names: Sequence[str]) -> dict[str, ColumnType]:
        return dict.fromkeys([""] if len(names) == 1 else names, "number")

    def table_row(self, answer: Any) -> dict[str, Any]:
        """Every number by its name; a single one is the task's own."""
        if len(answer) == 1:
            return {"": answer[0]["value"]}
        return {one["name"]: one["value"] for one in answer}


class Segmentation(Kind):
    name = "segmentation"
    columns = ("miou", "pixel_accuracy", "loss")
    title = "mean IoU"
    class_title = "IoU"
    head_class = MaskHead
    least = 2
    per_pixel = True
    mixes = False
    picture = "mask"

    def head_macs(self, sizes: HeadSizes, patches: int) -> int:
        width = sizes.features
        tokens = sizes.classes * width * (width + patches) if sizes.token_per_class else 0
        return patches * super().head_macs(sizes, patches) + tokens

    def losses(
        self, outputs: Tensor, labels: Tensor, head: TaskHead, smoothing: float, weights: Weights
    ) -> Tensor:
        return self._losses(outputs, labels, smoothing)

    def _losses(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Mean loss over the pixels of each image that count; 0 where none does."""
        lost = F.cross_entropy(
            outputs.float(), labels.long(), ignore_index=IGNORED, reduction="none",
            label_smoothing=smoothing,
        )  # fmt: skip
        return lost.flatten(1).sum(1) / (labels != IGNORED).flatten(1).sum(1).clamp(min=1)

    def keep(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`metrics.pixel_counts` and the loss of each picture; the masks themselves are let go."""
        labels = to_device(labels, outputs.device)
        counts = metrics.pixel_counts(outputs.argmax(1), labels, outputs.shape[1], IGNORED)
        return counts, self._losses(outputs, labels).cpu()

    def metrics(self, kept: Pairs, fitted: Fitted, unreadable: int = 0) -> dict[str, Any]:
        return metrics.segmentation_metrics(kept)

    def class_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        return metrics.intersection_over_union(logits.sum(0))

    def condensed(self, outputs: Tensor) -> Tensor:
        """Masks, uint8 (b, h, w): the class of every pixel."""
        return outputs.argmax(1).to(torch.uint8)

    def uncertainty(self, outputs: Tensor, fitted: Fitted) -> Tensor | None:
        """The mean over the pixels."""
        return _margin_uncertainty(outputs).mean((1, 2))

    def labels(self, output: Tensor, fitted: Fitted) -> tuple[list[int], float | None]:
        """The class of most pixels."""
        classes = output.argmax(0) if output.ndim == 3 else output
        return [int(classes.flatten().bincount().argmax())], None

    def answer(self, output: Tensor, names: Sequence[str], fitted: Fitted, top_k: int = 5) -> Any:
        """{"classes": [{"class", "share"}, …], "size": [height, width], "mask": a data: URL}.

        The mask is a PNG with a palette: a pixel's number is its class, in the order of the
        task's classes. It covers what the backbone saw of the picture: the evaluation view.
        `top_k` classes are listed, those with most pixels first. `output` may be a mask already.
        """
        from engram.images.masks import mask_png

        classes = self.condensed(output[None])[0] if output.ndim == 3 else output
        counts = torch.bincount(classes.flatten(), minlength=len(names))
        best = counts.argsort(descending=True, stable=True)[:top_k].tolist()
        png = mask_png(classes.cpu().numpy(), len(names))
        return {
            "classes": [
                {"class": names[i], "share": round(float(counts[i]) / classes.numel(), 6)}
                for i in best
            ],
            "size": list(classes.shape),
            "mask": f"data:image/png;base64,{base64.b64encode(png).decode()}",
        }

    def agreement(self, one: Reading, other: Reading) -> float:
        """The share of pixels that have the same class in both masks."""
        places = {name: i for i, name in enumerate(dict.fromkeys((*one[1], *other[1])))}
        masks = []
        for output, names, _ in (one, other):
            mask = self.condensed(output[None])[0] if output.ndim == 3 else output
            masks.append(torch.tensor([places[name] for name in names])[mask.cpu().long()])
        return float((masks[0] == masks[1]).float().mean())

    def words(self, answer: Any) -> str:
        return ", ".join(f"{one['class']} {one['share']:.1%}" for one in answer["classes"])

    def table_columns(self, names: Sequence[str]) -> dict[str, ColumnType]:
        top = {"class": "text", "share": "number"}
        return {"": "text", "share": "number", "top": top, "mask": "text"}

    def table_row(self, answer: Any) -> dict[str, Any]:
        """The class with most pixels, its share, the shares of `top_k` classes, and the mask."""
        first = answer["classes"][0]
        shares = {"share": first["share"], "top": answer["classes"]}
        return {"": first["class"], **shares, "mask": answer["mask"]}


class Anomaly(Kind):
    """Labels are 0 for good images and 1 for others.

    Or they are masks: 0 in good images, 1 where something is wrong, 2 elsewhere in the same image.
    """

    name = "anomaly"
    columns = (
        *("auroc", "pixel_auroc", "average_precision"),
        *("balanced_accuracy", "false_alarms", "recall"),
    )
    title = "balanced accuracy"
    class_title = "AUROC"
    head_class = BankHead
    fitted = ("thresholds",)
    smooths = False
    ranked = False
    one_class = True
    picture = "map"

    @property
    def score(self) -> str:
        """A number that good images alone have, too; areas under curves need both."""
        return "balanced_accuracy"

    def head_macs(self, sizes: HeadSizes, patches: int) -> int:
        return patches * super().head_macs(sizes, patches)

    def losses(
        self, outputs: Tensor, labels: Tensor, head: TaskHead, smoothing: float, weights: Weights
    ) -> Tensor:
        raise EngramError(
            "The memory bank of an anomaly task is filled from one pass over good images: it takes "
            "no training steps, so there is nothing to sweep or to average; use fit."
        )

    def fit_buffers(self, head: TaskHead, kept: Pairs) -> None:
        """Choose the threshold that few of the good images reach."""
        good = kept[0][kept[1] == 0, 0]
        if len(good):
            head.fitted["thresholds"].fill_(metrics.alarm_threshold(good))

    def keep(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of images, with histograms of those of their pixels if there are masks."""
        maps = outputs.float().cpu()
        scores = metrics.image_scores(maps)[:, None]
        if labels.ndim == 1:
            return scores, labels
        counts = metrics.pixel_histograms(maps, labels == 1)
        return torch.cat([scores, counts.flatten(1)], 1), (labels != 0).flatten(1).any(1).long()

    def metrics(self, kept: Pairs, fitted: Fitted, unreadable: int = 0) -> dict[str, Any]:
        return metrics.anomaly_metrics(kept, float(fitted["thresholds"]))

    def class_scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        found = metrics.anomaly_metrics((logits, labels), 0.0)
        return torch.tensor([found.get("auroc", math.nan)])

    def scores(self, output: Tensor) -> Tensor:
        """The score of the image."""
        return metrics.image_scores(output.float()[None])

    def labels(self, output: Tensor, fitted: Fitted) -> tuple[list[int], float | None]:
        anomalous = float(self.scores(output)) > float(fitted["thresholds"])
        return [0] if anomalous else [], None

    def answer(self, output: Tensor, names: Sequence[str], fitted: Fitted, top_k: int = 5) -> Any:
        """{"score", "threshold", "anomalous", "size": [rows, columns], "map": a data: URL}.

        The score is the mean distance of the worst 1 % of the patches. The map is a PNG of the
        distances with a palette: 0 is none, 128 the threshold, 255 twice the threshold or more. It
        covers what the backbone saw of the picture: the evaluation view.
        """
        from engram.images.heat_maps import heat_map_png

        score = float(self.scores(output))
        threshold = float(fitted["thresholds"])
        png = heat_map_png((output / max(threshold, 1e-6)).cpu().numpy())
        return {
            "score": round(score, 6),
            "threshold": round(threshold, 6),
            "anomalous": score > threshold,
            "size": list(output.shape),
            "map": f"data:image/png;base64,{base64.b64encode(png).decode()}",
        }

    def words(self, answer: Any) -> str:
        score, threshold = (f"{answer[name]:.3f}" for name in ("score", "threshold"))
        return f"{self._word(answer)}: score {score}, threshold {threshold}"

    def table_columns(self, names: Sequence[str]) -> dict[str, ColumnType]:
        return {"": "text", "score": "number", "threshold": "number", "map": "text"}

    def table_row(self, answer: Any) -> dict[str, Any]:
        """`good` or `anomalous`, the score, the threshold, and the heat map."""
        return {"": self._word(answer), **{k: answer[k] for k in ("score", "threshold", "map")}}

    @staticmethod
    def _word(answer: Any) -> str:
        return "anomalous" if answer["anomalous"] else "good"


def _margin_uncertainty(logits: Tensor) -> Tensor:
    """1 minus the margin: what the likeliest class has more than the next one (axis 1)."""
    if logits.shape[1] < 2:
        return torch.zeros_like(logits[:, 0])
    first, second = logits.float().softmax(1).topk(2, dim=1).values.unbind(1)
    return 1 - (first - second)


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (Classification(), Multilabel(), Regression(), Segmentation(), Anomaly())
}
