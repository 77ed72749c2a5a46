"""What a page shows of the predictions of each kind of task: scores per class, plots, mistakes.

Only `report` imports it. There is a module for each kind; `FINDINGS` has their functions by the
kind's name, and each gives the subsections of a task's section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engram.inference.evaluate import Answers
from engram.model.memory_vit import MemoryViT
from engram.report.contents import Subsection
from engram.report.findings.classification import classification_findings
from engram.report.findings.multilabel import multilabel_findings
from engram.report.findings.regression import regression_findings
from engram.report.findings.segmentation import segmentation_findings

FINDINGS: Mapping[str, Callable[[MemoryViT, Answers], Sequence[Subsection]]] = {
    "classification": classification_findings,
    "multilabel": multilabel_findings,
    "regression": regression_findings,
    "segmentation": segmentation_findings,
}
