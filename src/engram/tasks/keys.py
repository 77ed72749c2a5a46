"""The keys of tasks in a model's state dict: by name, so that no order can swap two tasks.

The task `flowers` is the submodule `task:flowers`, and `state_dict()` has `task:flowers.cells` and
so on. No attribute of a module has a colon in its name, so none can be hidden by a task. A dot in
the name of a task is written as `%2E`, because dots separate modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engram.errors import EngramError

_PREFIX = "task:"


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


def _quoted(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return f"the task{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
