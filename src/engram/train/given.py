"""Settings of a run: the flags, and below them those of a recipe file (`--recipe FILE`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.train.options import RunOptions
from engram.train.recipe import RECIPES, Recipe, read_settings
from engram.util.flag_names import naming_flags
from engram.util.settings import Given, check_value, setting, settings_fields


@dataclass(frozen=True)
class _Own:
    """The flags that commands have besides those of settings classes, where they are no lists."""

    regime: str = setting("", "as --regime")
    seeds: int = setting(1, "as --seeds", least=1)
    refit: bool = setting(False, "as --refit")
    soup: int = setting(0, "as --soup", least=0)
    own_pass: bool = setting(False, "as --own-pass")


def with_recipe_file(given: Given, **own: Any) -> tuple[Given, dict[str, Any]]:
    """Merge the recipe file that `--recipe` names and the flags; flags win.

    `own` are the flags of the command itself, None where they were not given. Both are returned
    with what the file says in the place of what was not given.
    """
    name = given[RunOptions].get("recipe", "default")
    if not names_file(name):
        return given, own
    said, flags = read_settings(Path(name)), given[Recipe]
    if "epochs" in flags and "steps" not in flags:
        said.pop("steps", None)  # else the file's steps would count
    if _wrote(said) == ("fit" if "refit" in own else "sweep"):
        del said["refit"]  # in fit it follows cross-validation, in a sweep it trains once more
    from_file = {key: said.pop(key) for key in own if key in said}
    if from_file.get("lr") == 0:  # in a recipe, the default of the regime
        del from_file["lr"]
    _check(name, _Own, {k: v for k, v in from_file.items() if k in _OWN})
    merged = {}
    for settings_class, values in given.items():
        items = {item.name: item for item in settings_fields(settings_class)}
        lower = {key: _tuple(said.pop(key)) for key in items if key in said}
        if settings_class is not Recipe:  # which is checked with its flags
            _check(name, settings_class, lower)
        # A flag that was not given is None, or False where it can only turn something on.
        above = {
            k: v
            for k, v in values.items()
            if v is not False or k not in lower or items[k].default is True
        }
        merged[settings_class] = {**lower, **above}
    if any(said.values()):
        raise EngramError(f"{name} sets {', '.join(said)}, for which there is engram sweep.")
    return merged, {key: from_file.get(key) if own[key] is None else own[key] for key in own}


def _wrote(said: Mapping[str, Any]) -> str:
    """The command whose run wrote these settings, which are then all that there are; else ""."""
    if not {"folds", "refit"} <= said.keys():
        return ""
    return "sweep" if "seeds" in said else "fit"


_OWN = {item.name for item in fields(_Own)}


def names_file(recipe: str) -> bool:
    """Whether a recipe is meant as a file, and not as the name of one of ours."""
    return recipe not in RECIPES and (recipe.endswith(".toml") or Path(recipe).is_file())


def _check(name: str, settings_class: type, values: dict[str, Any]) -> None:
    try:
        with naming_flags(False):
            for item in settings_fields(settings_class):
                if item.metadata and item.name in values:
                    check_value(item, values[item.name])
    except EngramError as error:
        raise EngramError(f"{name}: {error}") from None


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
