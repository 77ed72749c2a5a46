"""Options of runs about data, tasks and recipes, from flags, recipe files and files of jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.errors import EngramError, naming_flags
from engram.train.recipe import RECIPES, Recipe, read_settings
from engram.util.settings import (
    ComputeSettings,
    Given,
    check_value,
    setting,
    setting_of,
    settings_fields,
)
from engram.util.text import words

if TYPE_CHECKING:
    from engram.data.datasets import Splits


@dataclass(frozen=True)
class ColumnOptions:
    """Columns of a table, or of a Hub dataset. Every command on data has these."""

    image_column: str = setting("", "column of a table that holds the images", metavar="NAME")
    label: str = setting("", "label column of a table, or several columns", metavar="A,B")
    split_column: str = setting(
        "", "column of a table that says the split of a row; none if there is none", metavar="NAME"
    )

    def columns(self) -> dict[str, Any]:
        """The arguments of `data.load` that they are."""
        return {
            "image": self.image_column or None,
            "label": words(self.label) or None,
            "split_column": self.split_column or None,
        }


@dataclass(frozen=True)
class DataOptions(ColumnOptions):
    """Kind of task that the data is for, and its labels."""

    group_column: str = setting(
        "",
        "column of a table that says what belongs together (a patient, a video): such rows are "
        "held out together",
        metavar="NAME",
    )
    kind: str = setting(
        "classification",
        "kind of task",
        choices=("classification", "multilabel", "regression", "segmentation", "anomaly"),
    )
    classes: str = setting(
        "", "class names; for masks with their values: pet=1,sky=2", metavar="A,B"
    )
    ignore: int | None = setting(
        None, "value of ignored pixels in masks; 255 if not given", metavar="VALUE"
    )

    def load(self, data: str, one_class: bool = False) -> Splits:
        """The data, as these options describe it; with `one_class`, it may have only one."""
        from engram.data.datasets import load
        from engram.tasks.kind import IGNORED

        names, values = self._classes()
        self._check_masks(bool(values))
        return load(
            data,
            **self.columns(),
            group_column=self.group_column or None,
            kind=self.kind,
            classes=names or None,
            values=values or None,
            ignore=IGNORED if self.ignore is None else self.ignore,
            one_class=one_class,
        )

    def _classes(self) -> tuple[list[str], list[int]]:
        """The names of classes and, if every one has one, their values in masks."""
        pairs = [part.rpartition("=") for part in self.classes.split(",") if part.strip()]
        names = [(name if equals else rest).strip() for name, equals, rest in pairs]
        if not any(equals for _, equals, _ in pairs):
            return names, []
        try:
            return names, [int(value) for _, _, value in pairs]
        except ValueError:
            raise EngramError(
                f"--classes is {self.classes!r}; give every class the value that it has in masks, "
                "such as pet=1,background=2, or none of them."
            ) from None

    def _check_masks(self, values: bool) -> None:
        """Refuse options about masks where the kind of task has none."""
        from engram.tasks.kinds import KINDS

        if self.kind not in KINDS or KINDS[self.kind].per_pixel:
            return
        for flag, given in (("--ignore", self.ignore is not None), ("--classes with =", values)):
            if given:
                raise EngramError(f"{flag} is about masks, and {self.kind} has none; leave it out.")


@dataclass(frozen=True)
class RunOptions:
    """Backbone, recipe and outputs of a run, and how it treats an earlier one."""

    backbone: str = setting(
        "auto",
        "the backbone: a path, a Hub id, a name that `engram backbones` lists, pico, or auto: "
        "pico for images of up to 48 pixels, else a recommended ViT",
        group="Task",
        metavar="BACKBONE",
    )
    image_size: int | None = setting(
        None, "height and width of images in pixels, if not the backbone's own", group="Task"
    )
    backbone_dtype: str = setting_of(ComputeSettings, "backbone_dtype", group="Resources")
    recipe: str = setting(
        "default",
        "settings to start from: default, paper, or a .toml file",
        offers=tuple(RECIPES),
        group="Training",
    )
    device: str = setting_of(ComputeSettings, "device", group="Resources", metavar="NAME")
    resume: bool = setting(False, "continue an interrupted run", group="Training")
    test: bool = setting(False, "evaluate the test split once, at the end", group="Data")
    overwrite: bool = setting(False, "replace the engram if it exists", group="Output")
    log: str = setting(
        "",
        "where to log the run, besides its folder: csv, tensorboard, mlflow, wandb",
        group="Output",
        metavar="A,B",
    )


def recipe_from(name: str, given: Mapping[str, Any]) -> Recipe:
    """The named recipe with the settings that were given."""
    if name not in RECIPES:
        raise EngramError(
            f"There is no recipe {name!r}; choose one of {', '.join(RECIPES)}, or give the path of "
            "a .toml file."
        )
    changes = {key: value for key, value in given.items() if value is not None}
    if "epochs" in changes:
        changes.setdefault("steps", 0)  # else the recipe's own steps would count
    return RECIPES[name].but(**changes)


def named(text: str, names: Collection[str] = ()) -> tuple[str, str]:
    """NAME=REST in its two parts; no name where there is none, or the text is a path with a =."""
    name, equals, rest = text.partition("=")
    if not equals or (name not in names and Path(text).exists()):
        return "", text
    return name, rest


def split_data(text: str, split: str) -> tuple[str, str]:
    """DATA:split in its two parts; the given split where the text names none, or is a path.

    Only the name of a split after the last colon counts, so drives, presets with a copy and
    hf:owner/name:config stay whole.
    """
    from engram.data.source import usual_split

    data, colon, name = text.rpartition(":")
    named = usual_split(name) if colon else None
    if named is None or data.endswith(":") or data in ("", "hf") or Path(text).exists():
        return text, split
    return data, named


# The recipe file of `--recipe FILE`, below the flags


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
    try:
        with naming_flags(False):
            settings_from(dict(from_file), _Own)
            below = {one: settings_from(said, one, one is not Recipe) for one in given}
    except EngramError as error:
        raise EngramError(f"{name}: {error}") from None
    merged = {}
    for one, values in given.items():
        # A flag that was not given is None, or False where it can only turn something on.
        can_be_off = {item.name for item in settings_fields(one) if item.default is True}
        not_given = {k for k in below[one] if values.get(k) is False} - can_be_off
        merged[one] = below[one] | {k: v for k, v in values.items() if k not in not_given}
    if any(said.values()):
        raise EngramError(f"{name} sets {', '.join(said)}, for which there is engram sweep.")
    return merged, {key: from_file.get(key) if own[key] is None else own[key] for key in own}


def _wrote(said: Mapping[str, Any]) -> str:
    """The command whose run wrote these settings, which are then all that there are; else ""."""
    if not {"folds", "refit"} <= said.keys():
        return ""
    return "sweep" if "seeds" in said else "fit"


def names_file(recipe: str) -> bool:
    """Whether a recipe is meant as a file, and not as the name of one of ours."""
    return recipe not in RECIPES and (recipe.endswith(".toml") or Path(recipe).is_file())


def settings_from(
    said: dict[str, Any], settings_class: type, checked: bool = True
) -> dict[str, Any]:
    """The settings of a class, taken out of a table of all; a recipe is checked with its flags."""
    taken = {}
    for item in settings_fields(settings_class):
        if item.name in said:
            value = said.pop(item.name)
            taken[item.name] = tuple(value) if isinstance(value, list) else value
            if checked:
                check_value(item, taken[item.name])
    return taken
