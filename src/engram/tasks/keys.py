"""The keys of tasks in a model's state dict: by name, so that no order can swap two tasks.

The task `flowers` is the submodule `task:flowers`, and `state_dict()` has `task:flowers.cells` and
so on. No attribute of a module has a colon in its name, so none can be hidden by a task. A dot in
the name of a task is written as `%2E`, because dots separate modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from engram.errors import EngramError

_PREFIX = "task:"
_POSITIONAL = "_modules_of_tasks."  # of earlier versions, followed by the place of the task


def module_name(task: str) -> str:
    """The name of the submodule that a task is."""
    return _PREFIX + task.replace("%", "%25").replace(".", "%2E")


def task_name(module: str) -> str | None:
    """The task that a submodule is, by its name; None if it is no task."""
    if not module.startswith(_PREFIX):
        return None
    return module.removeprefix(_PREFIX).replace("%2E", ".").replace("%25", "%")


def check_tasks(state: Iterable[str], tasks: Collection[str]) -> None:
    """Refuse the keys of a state dict with other tasks than these."""
    if any(key.startswith(_POSITIONAL) for key in state):  # `name_tasks` decides
        return
    given = {name for key in state if (name := task_name(key.split(".")[0])) is not None}
    problems = []
    if missing := [name for name in tasks if name not in given]:
        problems.append(f"does not have {_quoted(missing)}, which the model has")
    if unknown := sorted(given - set(tasks)):
        problems.append(f"has {_quoted(unknown)}, which the model does not have")
    if problems:
        raise EngramError(
            f"The state dict {', and '.join(problems)}, so nothing was loaded; add or detach "
            "tasks until both have the same, or pass strict=False to load those that both have."
        )


def name_tasks(state: dict[str, Any], prefix: str, tasks: Sequence[str]) -> None:
    """Rename keys of earlier versions, which number the tasks, in place.

    That needs a single task on both sides; with more it is an EngramError.
    """
    old = prefix + _POSITIONAL
    keys = [key for key in state if key.startswith(old)]
    if not keys:
        return
    places = {key.removeprefix(old).split(".")[0] for key in keys}
    if len(places) > 1 or len(tasks) != 1:
        raise EngramError(
            "The state dict is of an earlier version, which numbered tasks and did not name them: "
            f"it has {len(places)} and the model has {len(tasks)}, so it is not known which is "
            "which, and nothing was loaded. Load the tensors of each task by itself, with "
            "model.task(name).load_state_dict, or save tasks as engrams, with model.save."
        )
    for key in keys:
        _, _, own = key.removeprefix(old).partition(".")
        state[f"{prefix}{module_name(tasks[0])}.{own}"] = state.pop(key)


def _quoted(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return f"the task{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
