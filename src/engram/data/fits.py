"""Whether data has the classes of a task."""

from collections.abc import Sequence

from engram.data.datasets import Dataset, Splits
from engram.errors import EngramError
from engram.images.masks import Legend
from engram.tasks.spec import TaskSpec


def check_fits(spec: TaskSpec, data: Splits | Dataset, *, same_ignore: bool = False) -> None:
    """Raise an EngramError unless the data has the kind, classes and mask values of the task.

    With `same_ignore` the value of ignored pixels must be the same too. A task that is trained
    stores it; evaluation does not depend on it.
    """
    legend = data.legend or Legend((), spec.ignore)
    if data.kind != spec.kind:
        difference = f"has the kind {spec.kind}, but {data.name} has the kind {data.kind}"
    elif data.classes != spec.classes:
        noun, order = spec.kind_object.nouns[1], ""
        if sorted(data.classes) == sorted(spec.classes):
            order = " in another order"
        difference = (
            f"has {len(spec.classes)} {noun} ({shortened(spec.classes)}), but {data.name} has "
            f"{len(data.classes)}{order} ({shortened(data.classes)})"
        )
    elif legend.values != spec.values or (same_ignore and legend.ignore != spec.ignore):
        difference = (
            f"has the mask values {shortened(spec.values)} and ignores {spec.ignore}, but "
            f"{data.name} has {shortened(legend.values)} and ignores {legend.ignore}"
        )
    else:
        return
    raise EngramError(
        f"The task {spec.name!r} {difference}; load the data with "
        f"like=model.task({spec.name!r}).spec, or add the task with **splits.task."
    )


def shortened(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:4])) + (", …" if len(names) > 4 else "")
