"""Datasets of the Hugging Face Hub, and those known by name: from there, or from a copy on disk."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engram.data.labels import LABELS, find_column, read_labels
from engram.data.source import (
    SPLITS,
    DataRequest,
    Files,
    FoundData,
    FoundSplit,
    Rows,
    StoredImage,
    match_splits,
)
from engram.data.split_columns import NO_COLUMN, could_divide, divide_rows
from engram.errors import EngramError, flag
from engram.images.decode import BadImage
from engram.util.documents import MAX_BYTES, load_json
from engram.util.files import open_regular
from engram.util.optional import require
from engram.util.text import explained, first_line, printable

UNSPLIT = "all"  # the name given to the rows of a file or folder that has no splits


@dataclass(frozen=True, eq=False)
class HubRows(Rows):
    """Images in a column of a `datasets` dataset, left encoded until they are read."""

    table: Any
    column: str
    name: str

    def read(self, row: int) -> StoredImage:
        value = self.table[row][self.column]
        if isinstance(value, Mapping):  # an undecoded Image column
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if not isinstance(value, (bytes, str)):
            raise BadImage(f"{self.row_name(row)}: the column {self.column} holds no image")
        return value


def read_hub(source: str, request: DataRequest) -> FoundData:
    """Read a dataset of the Hub, "owner/name" or "owner/name:config", or a copy of one on disk."""
    datasets = require("datasets", extra="hub-data", purpose=f"hf:{source}")
    with explained(lambda error: f"hf:{source} cannot be loaded: {first_line(error)}."):
        tables = _load_tables(datasets, source)
    return read_tables(tables, f"hf:{source}", request, "the Hub")


def read_tables(tables: Mapping[str, Any], title: str, request: DataRequest, by: str) -> FoundData:
    """Read tables of the package `datasets` by the names of their splits, which `by` gives."""
    if list(tables) == [UNSPLIT]:
        by = ""
    divided = _divide(tables, title, request)
    if divided:
        tables, by = divided
        request = replace(request, split_names={})
    names = match_splits(tables, request.split_names, title)
    splits = {s: _read_split(tables[n], f"{title}/{n}", request) for s, n in names.items()}
    return FoundData(splits, split_by=by)


def _divide(
    tables: Mapping[str, Any], source: str, request: DataRequest
) -> tuple[dict[str, Any], str] | None:
    """Divide a single table by a column that says the split of every row, if there is one."""
    if request.split_names and set(request.split_names.values()) <= tables.keys():
        return None
    if len(tables) > 1:
        if request.split_column not in (None, NO_COLUMN):
            raise EngramError(
                f"{source} has the splits {', '.join(tables)}, so {flag('split_column')} has no "
                "meaning; leave it out."
            )
        return None
    (table,) = tables.values()
    image, labels, _ = _columns(table, source, request)

    def cells(column: str, rows: slice = slice(None)) -> list[Any]:
        found: list[Any] = table.select_columns([column])[rows][column]
        names = getattr(table.features[column], "names", None)  # of a ClassLabel
        if names is None:
            return found
        return [names[i] if i in range(len(names)) else None for i in found]

    columns = table.column_names
    if request.split_column is None:  # a look at some rows spares reading all of every column
        plain = [c for c, f in table.features.items() if _type(f) in ("Value", "ClassLabel")]
        columns = [name for name in plain if could_divide(name, cells(name, slice(100)))]
    division = divide_rows(
        source, columns, cells, request, taken={image, *labels, request.group_column or image}
    )
    if division is None:
        return None
    rows = np.array([split or "" for split in division.splits])
    return {s: table.select(np.flatnonzero(rows == s)) for s in SPLITS if s in rows}, division.by


def _load_tables(datasets: Any, source: str) -> dict[str, Any]:
    path = Path(source)
    if path.is_file():
        tables = datasets.load_dataset("parquet", data_files=str(path), split="train")
    elif path.is_dir():
        _refuse_addresses(path)
        saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
        tables = (datasets.load_from_disk if saved else datasets.load_dataset)(str(path))
    elif source.startswith((".", "/", "~")):
        raise EngramError(f"hf:{source} does not exist on disk.")
    else:
        name, _, config = source.partition(":")
        tables = datasets.load_dataset(name, config or None)
    return dict(tables) if isinstance(tables, Mapping) else {UNSPLIT: tables}


def _refuse_addresses(folder: Path) -> None:
    """A card on disk may say where the files of its dataset are: here, and nowhere else."""
    yaml = require("yaml", extra="hub-data", purpose=f"hf:{folder}")
    for name in ("README.md", ".huggingface.yaml"):
        if not os.path.lexists(folder / name):
            continue
        with open_regular(folder / name) as file:
            text = file.read(MAX_BYTES).decode(errors="replace")
        if name == "README.md":
            front = re.match(r"\s*---[^\n]*\n(.*?)\n---", text.replace("\r", ""), re.DOTALL)
            text = front[1] if front else ""
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        pairs = root.value if isinstance(root, yaml.MappingNode) else []
        waiting = [value for key, value in pairs if key.value == "configs"]
        seen: set[int] = set()  # an alias is the same node again
        while waiting:
            node = waiting.pop()
            if isinstance(node, tuple):
                waiting += node
            elif id(node) not in seen:
                seen.add(id(node))
                if not isinstance(node.value, str):
                    waiting += node.value
                elif "://" in node.value or "::" in node.value:
                    raise EngramError(
                        f"{folder / name} names the address {printable(node.value)!r}, and what a "
                        "folder names elsewhere is not fetched; download it, and name the file."
                    )


def _read_split(table: Any, title: str, request: DataRequest) -> FoundSplit:
    image, columns, images = _columns(table, title, request)

    def encoded(column: str) -> HubRows:
        rows = table.select_columns([column])
        if column in images:
            rows = rows.cast_column(column, type(table.features[column])(decode=False))
        return HubRows(rows, column, title)

    groups = None
    if request.group_column is not None:
        group = find_column(title, table.column_names, "group", request.group_column)
        groups = table.select_columns([group])[:][group]
    if request.has_masks:
        masks = encoded(columns[0])
        return FoundSplit(encoded(image), [None] * len(table), masks, groups, label_columns=columns)
    feature = table.features[columns[0]]
    listed = getattr(getattr(feature, "feature", feature), "names", None)  # of a ClassLabel
    values = table.select_columns(columns)[:].values()
    cells = (dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True))
    labels = read_labels(title, cells, listed, request)
    return FoundSplit(encoded(image), labels, None, groups, listed, columns)


def _columns(table: Any, title: str, request: DataRequest) -> tuple[str, list[str], list[str]]:
    """The column of images, those of labels, and all that hold images."""
    available = table.column_names
    images = [c for c, feature in table.features.items() if _type(feature) == "Image"]
    only = images[0] if len(images) == 1 else None
    image = find_column(title, available, "image", request.image_column or only)
    labels = LABELS[request.kind].columns(title, available, request)
    return image, labels, images


def _type(feature: Any) -> str:
    """The name of a feature's type: `datasets` need not be imported for it."""
    return type(feature).__name__


# Datasets known by name


@dataclass(frozen=True)
class Preset:
    """A dataset known by name. `splits` maps train, val and test to the dataset's own names."""

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


def read_preset(name: str, copy: str, request: DataRequest) -> FoundData:
    """Read a dataset known by name, from the Hub or from a copy on disk."""
    preset = PRESETS[name]
    request = replace(
        request,
        image_column=request.image_column or preset.image,
        label_columns=request.label_columns or (preset.label,),
        split_column=None,
        split_names=request.split_names or preset.splits,
    )
    if preset.hub is not None:
        found = read_hub(copy or preset.hub, request)
    elif copy:
        found = _read_inaturalist(Path(copy), request)
    else:
        files = " and ".join(preset.splits.values())
        raise EngramError(
            f"{name} is not on the Hub; give the folder that holds {files}: {name}:PATH."
        )
    found.augment, found.flip = preset.augment, preset.flip
    return found


def _read_inaturalist(root: Path, request: DataRequest) -> FoundData:
    """iNaturalist's own layout: an annotation file per split next to the folder of images."""
    if request.kind != "classification":
        raise EngramError(
            f"{root} gives each image one class, so it cannot be used for {request.kind}."
        )
    splits = {}
    for split, file in request.split_names.items():
        if not (root / file).exists():
            raise EngramError(f"{root} has no {file}.")
        try:
            samples = sorted(_annotated_images(root, file))
        except (ValueError, KeyError, TypeError) as error:
            raise EngramError(f"{root / file} is not an annotation file: {error!r}.") from error
        rows = Files(tuple(image for image, _ in samples))
        splits[split] = FoundSplit(rows, [label for _, label in samples])
    return FoundData(splits, split_by=" and ".join(request.split_names.values()))


def _annotated_images(root: Path, file: str) -> list[tuple[str, str]]:
    """The path and the class of every image that an annotation file lists."""
    content = load_json((root / file).read_bytes())
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    if len(set(names.values())) < len(names):
        raise ValueError("two categories have the same name")
    paths = {image["id"]: str(root / image["file_name"]) for image in content["images"]}
    return [(paths[a["image_id"]], names[a["category_id"]]) for a in content["annotations"]]
