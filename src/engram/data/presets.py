"""Datasets of the Hub, and those known by name: from there, or from a copy on disk."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram.data.labels import LABELS, column
from engram.data.sources import (
    Columns,
    Files,
    Found,
    Picture,
    Source,
    named_splits,
    read_labels,
)
from engram.errors import EngramError
from engram.images.decode import BadImage
from engram.util.optional import require

_LONE = "all"  # what to call the rows of a file or folder that has no splits


@dataclass(frozen=True, eq=False)
class HubRows:
    """Pictures in a column of a `datasets` dataset, left encoded until they are read."""

    table: Any
    column: str
    name: str

    def __len__(self) -> int:
        return len(self.table)

    def read(self, row: int) -> Picture:
        value = self.table[row][self.column]
        if isinstance(value, Mapping):  # an undecoded Image column
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if not isinstance(value, (bytes, str)):
            raise BadImage(f"{self.where(row)}: column {self.column} holds no picture")
        return value

    def where(self, row: int) -> str:
        return f"{self.name}[{row}]"


@dataclass(frozen=True)
class Preset:
    """A dataset known by name. `splits` says which of its splits is used as which of ours."""

    hub: str | None
    image: str
    label: str
    splits: Mapping[str, str]
    augment: str = "inception"
    flip: bool = True


_LABELLED_TEST = {"train": "train", "test": "test"}
# The challenge's test labels are secret: its validation split is what papers report on.
_SECRET_TEST = {"train": "train", "test": "validation"}

PRESETS = {
    "cifar10": Preset("uoft-cs/cifar10", "img", "label", _LABELLED_TEST, "pad-crop"),
    "cifar100": Preset("uoft-cs/cifar100", "img", "fine_label", _LABELLED_TEST, "pad-crop"),
    "mnist": Preset("ylecun/mnist", "image", "label", _LABELLED_TEST, "pad-crop", flip=False),
    "sun397": Preset("tanganke/sun397", "image", "label", _LABELLED_TEST),
    "imagenet1k": Preset("ILSVRC/imagenet-1k", "image", "label", _SECRET_TEST),
    "places365": Preset("ljnlonoljpiljm/places365-256px", "image", "label", {"train": "train"}),
    "inaturalist2017": Preset(
        None, "file_name", "category_id", {"train": "train2017.json", "test": "val2017.json"}
    ),
}


def hub(where: str, names: Columns) -> Source:
    """A dataset of the Hub, "owner/name" or "owner/name:config", or one that lies on disk."""
    datasets = require("datasets", extra="hub-data", purpose=f"hf:{where}")
    try:
        tables = _hub_tables(datasets, where)
    except EngramError:
        raise
    except Exception as error:  # the network, the Hub and the files can fail in any way
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise EngramError(f"hf:{where} cannot be loaded: {reason}") from error
    splits = {}
    classes = None
    for ours, theirs in named_splits(tables, names.splits, f"hf:{where}").items():
        table = tables[theirs]
        title = f"hf:{where}/{theirs}"
        pictures = [c for c, kind in table.features.items() if isinstance(kind, datasets.Image)]
        only = pictures[0] if len(pictures) == 1 else None
        image = column(title, table.column_names, "image", names.image or only)
        wanted = LABELS[names.kind].columns(title, table.column_names, names.labels, names.classes)

        def encoded(
            name: str, table: Any = table, title: str = title, pictures: Sequence[str] = pictures
        ) -> HubRows:
            rows = table.select_columns([name])
            if name in pictures:
                rows = rows.cast_column(name, datasets.Image(decode=False))
            return HubRows(rows, name, title)

        if names.masks:
            count = len(table)
            splits[ours] = Found(encoded(image), [None] * count, encoded(wanted[0]))
            continue
        kind = table.features[wanted[0]]
        listed = getattr(getattr(kind, "feature", kind), "names", None)  # of a ClassLabel
        classes = classes or listed
        cells = table.select_columns(wanted)[:]
        labels = read_labels(
            title,
            (dict(zip(wanted, row, strict=True)) for row in zip(*cells.values(), strict=True)),
            listed,
            names,
        )
        splits[ours] = Found(encoded(image), labels)
    return Source(splits, classes, unsplit=list(tables) == [_LONE], columns=wanted)


def _hub_tables(datasets: Any, where: str) -> dict[str, Any]:
    path = Path(where)
    if path.is_file():
        tables = datasets.load_dataset("parquet", data_files=str(path), split="train")
    elif path.is_dir():
        saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
        tables = (datasets.load_from_disk if saved else datasets.load_dataset)(str(path))
    elif where.startswith((".", "/", "~")):
        raise EngramError(f"hf:{where} does not exist on disk")
    else:
        name, _, config = where.partition(":")
        tables = datasets.load_dataset(name, config or None)
    return dict(tables) if isinstance(tables, Mapping) else {_LONE: tables}


def preset(name: str, copy: str, names: Columns) -> Source:
    """A dataset known by name, from the Hub or from a copy on disk."""
    known = PRESETS[name]
    names = replace(
        names,
        image=names.image or known.image,
        labels=names.labels or (known.label,),
        split=None,
        splits=names.splits or known.splits,
    )
    if known.hub is not None:
        source = hub(copy or known.hub, names)
    elif copy:
        source = _annotated(Path(copy), names)
    else:
        files = " and ".join(known.splits.values())
        raise EngramError(
            f"{name} is not on the Hub; give the folder that holds {files}: {name}:PATH"
        )
    source.augment, source.flip = known.augment, known.flip
    return source


def _annotated(root: Path, names: Columns) -> Source:
    """iNaturalist's own layout: an annotation file per split beside the folder of pictures."""
    if names.kind != "classification":
        raise EngramError(f"{root} tells one class a picture, which is no data for {names.kind}")
    splits = {}
    for ours, file in names.splits.items():
        if not (root / file).exists():
            raise EngramError(f"{root} has no {file}")
        try:
            notes = json.loads((root / file).read_text(encoding="utf-8"))
            category = {entry["id"]: str(entry["name"]) for entry in notes["categories"]}
            if len(set(category.values())) < len(category):
                raise ValueError("two categories have the same name")
            path = {entry["id"]: str(root / entry["file_name"]) for entry in notes["images"]}
            pairs = [
                (path[n["image_id"]], category[n["category_id"]]) for n in notes["annotations"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise EngramError(f"{root / file} is not an annotation file: {error!r}") from error
        pairs.sort()
        rows = Files(tuple(image for image, _ in pairs))
        splits[ours] = Found(rows, [label for _, label in pairs])
    return Source(splits)
