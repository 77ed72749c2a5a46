"""The sources of data that are understood, each read into the same two things: rows and labels.

A reader lists pictures without opening them, and says in a sentence what is wrong with what it
was given. `data.load` chooses the reader and numbers the labels.
"""

import csv
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engram.data.labels import LABELS, column
from engram.errors import EngramError
from engram.images.masks import MASK_VALUES
from engram.tasks.kinds import KINDS
from engram.util.optional import require

Picture: TypeAlias = str | bytes | npt.NDArray[np.uint8]  # a path, an encoded picture, or pixels

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".jp2", ".avif"),
)
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


class Rows(Protocol):
    """What a source gives: a picture by its number, and what to call that picture."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> Picture: ...

    def where(self, row: int) -> str: ...


@dataclass(frozen=True)
class Files:
    """Pictures that are files."""

    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, row: int) -> Picture:
        return self.paths[row]

    def where(self, row: int) -> str:
        return self.paths[row]


@dataclass(frozen=True, eq=False)
class Arrays:
    """Pictures in memory, uint8 (N, H, W, 3) or (N, H, W).

    A tensor, because torch hands tensors to worker processes through shared memory.
    """

    pixels: torch.Tensor
    name: str

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, row: int) -> Picture:
        array: npt.NDArray[np.uint8] = self.pixels[row].numpy()
        return array

    def where(self, row: int) -> str:
        return f"{self.name}[{row}]"


@dataclass
class Found:
    """One split of a source before its labels are numbered: a label's name for every row.

    What a label is depends on the kind of task, see `labels`; for segmentation `masks` count.
    """

    rows: Rows
    labels: list[Any]
    masks: Rows | None = None
    columns: Sequence[str] = ("label",)  # that the labels were found in


@dataclass
class Source:
    """All splits of a source, by our names, and what the source knows about its classes."""

    splits: dict[str, Found]
    classes: Sequence[str] | None = None
    unsplit: bool = False  # nothing says that this is training data: it may serve as any split
    augment: str = "inception"
    flip: bool = True
    ignored: int = 0
    columns: Sequence[str] = ("label",)  # that the labels were found in


@dataclass(frozen=True)
class Columns:
    """What is wanted: the kind of labels, and names of columns, classes and splits if known."""

    image: str | None = None
    labels: tuple[str, ...] = ()
    split: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)  # ours -> theirs
    kind: str = "classification"
    classes: Sequence[str] = ()

    @property
    def masks(self) -> bool:
        return KINDS[self.kind].per_pixel


def _split_of(name: str) -> str | None:
    """train, val or test, if that is what `name` means."""
    return next((ours for ours, names in SPLITS.items() if name.lower() in names), None)


def named_splits(names: Iterable[str], given: Mapping[str, str], where: str) -> dict[str, str]:
    """Ours -> theirs, as given or by the usual names; a lone split is the training data."""
    theirs = list(names)
    if given:
        for name in given.values():
            if name not in theirs:
                raise EngramError(f"{where} has no split {name!r}; it has {', '.join(theirs)}")
        return dict(given)
    found: dict[str, str] = {}
    for name in theirs:
        ours = _split_of(name)
        if ours in found:
            raise EngramError(f"{where} has two {ours} splits: {found[ours]} and {name}")
        if ours:
            found[ours] = name
    if not found and len(theirs) == 1:
        return {"train": theirs[0]}
    if not found:
        shown = ", ".join(theirs[:8]) + (", …" if len(theirs) > 8 else "")
        known = ", ".join(name for names in SPLITS.values() for name in names)
        raise EngramError(
            f"{where} has the splits {shown}; rename them to what is understood ({known}), or say "
            "in Python with splits= which is which"
        )
    return found


# -------------------------------------------------------------------------------- folders


def folder(root: Path, names: Columns) -> Source:
    """A folder per class, and above them perhaps a folder per split."""
    if names.kind != "classification":
        raise EngramError(
            f"{root} is a folder of class folders, which tells one class a picture; {names.kind} "
            "needs a table with columns of labels, or an .npz file"
        )
    inside = _subfolders(root)
    named = {path.name: path for path in inside if _split_of(path.name)}
    beside = [path.name for path in inside if path.name not in named]
    for name, path in named.items():
        if set(beside) & {below.name for below in _subfolders(path)}:
            few = " and ".join(beside) if len(beside) < 4 else f"{', '.join(beside[:3])}, …"
            raise EngramError(
                f"{root} has class folders beside {name}/, which has folders of the same names; "
                f"put {few} into {root / 'train'}/"
            )
    # Among vehicles, "train" is a class: a folder of splits has class folders in its train/.
    in_train = [p for name, p in named.items() if _split_of(name) == "train" and _subfolders(p)]
    has_splits = bool(named) and (len(named) == len(inside) or bool(in_train))
    if has_splits:
        ours = named_splits(named, {}, str(root))
        trees = {split: _class_folders(named[name]) for split, name in ours.items()}
    else:
        trees = {"train": _class_folders(root)}
    return Source(
        {split: found for split, (found, _) in trees.items()},
        unsplit=not has_splits,
        ignored=sum(ignored for _, ignored in trees.values()),
    )


def _class_folders(root: Path) -> tuple[Found, int]:
    paths: list[str] = []
    labels: list[str] = []
    ignored = 0
    folders = _subfolders(root)
    if not folders:
        loose = any(path.suffix.lower() in SUFFIXES for path in root.iterdir())
        reason = "has images but no class folders: put them into a folder per class"
        raise EngramError(f"{root} {reason if loose else 'is an empty folder'}")
    for folder in folders:
        images, others = images_below(folder)
        if not images:
            raise EngramError(f"{folder} is a class without images: add some or remove the folder")
        paths += images
        labels += [folder.name] * len(images)
        ignored += others
    return Found(Files(tuple(paths)), labels), ignored


def _subfolders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not _hidden(p.name))


def _hidden(name: str) -> bool:
    """Whether a folder holds what a program left there, such as .ipynb_checkpoints, __MACOSX."""
    return name.startswith((".", "__"))


def images_below(folder: Path) -> tuple[list[str], int]:
    """The images in a folder at any depth, sorted, and how many other files there are.

    Hidden files are among the others; hidden folders are passed over, links to folders followed.
    """
    files: list[str] = []
    for at, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        folders[:] = [n for n in folders if not (_hidden(n) or _leads_back(Path(at, n)))]
        files += [os.path.join(at, name) for name in names]
    images = [
        path
        for path in files
        if os.path.splitext(path)[1].lower() in SUFFIXES
        and not os.path.basename(path).startswith(".")
    ]
    return sorted(images), len(files) - len(images)


def _unreadable(error: OSError) -> None:
    raise EngramError(
        f"{error.filename} cannot be read ({error.strerror}); make it readable or remove it"
    )


def _leads_back(folder: Path) -> bool:
    """Whether this is a link to a folder that it lies in."""
    return folder.is_symlink() and folder.resolve() in {up.resolve() for up in folder.parents}


def mask_folders(root: Path, masks: Path | None) -> Source:
    """Pictures and masks in two trees of the same shape, perhaps with a folder per split on top.

    Without `masks` they are in `root`: images/ and masks/, or both inside every split's folder.
    """
    inside = {path.name: path for path in _subfolders(root)}
    named = {name: path for name, path in inside.items() if _split_of(name)}
    if masks is not None:
        return _paired(root, masks)
    if {"images", "masks"} <= inside.keys():
        return _paired(inside["images"], inside["masks"])
    if not named:
        raise EngramError(
            f"{root} has no folders images/ and masks/; put pictures and masks of the same names "
            "there, or give two folders of the same shape as PICTURES::MASKS"
        )
    splits, ignored = {}, 0
    for ours, name in named_splits(named, {}, str(root)).items():
        for needed in ("images", "masks"):
            if not (named[name] / needed).is_dir():
                raise EngramError(f"{named[name]} has no folder {needed}/")
        splits[ours], others = _pairs(named[name] / "images", named[name] / "masks")
        ignored += others
    return Source(splits, ignored=ignored)


def _paired(images: Path, masks: Path) -> Source:
    if not masks.is_dir():
        raise EngramError(f"{masks} is not a folder; give the folder of the masks")
    inside = {path.name: path for path in _subfolders(images)}
    named = [name for name in inside if _split_of(name)]
    if not named or len(named) < len(inside):
        found, ignored = _pairs(images, masks)
        return Source({"train": found}, unsplit=True, ignored=ignored)
    splits, ignored = {}, 0
    for ours, name in named_splits(named, {}, str(images)).items():
        splits[ours], others = _pairs(images / name, masks / name)
        ignored += others
    return Source(splits, ignored=ignored)


def _pairs(images: Path, masks: Path) -> tuple[Found, int]:
    """Every picture with the mask of the same name (and whatever ending) in the other tree."""
    pictures, ignored = images_below(images)
    if not pictures:
        raise EngramError(f"{images} has no pictures")
    there: dict[str, str] = {}
    for path in images_below(masks)[0]:
        stem = os.path.splitext(os.path.relpath(path, masks))[0]
        if stem in there:
            raise EngramError(f"{there[stem]} and {path} are masks of the same picture; keep one")
        there[stem] = path
    stems = [os.path.splitext(os.path.relpath(path, images))[0] for path in pictures]
    missing = [path for path, stem in zip(pictures, stems, strict=True) if stem not in there]
    if missing:
        more = f" (nor have {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise EngramError(f"{missing[0]} has no mask of its name in {masks}{more}")
    found = Files(tuple(there[stem] for stem in stems))
    return Found(Files(tuple(pictures)), [None] * len(pictures), found), ignored


# --------------------------------------------------------------------------------- tables


def table(path: Path, names: Columns) -> Source:
    """Rows of a path and labels (or a mask's path); they start at the table's own folder."""
    try:
        records = TABLES[path.suffix.lower()](path)
    except (csv.Error, ValueError, OSError) as error:
        raise EngramError(f"{path} cannot be read as a table: {error}") from error
    if not records:
        raise EngramError(f"{path} is an empty table")
    columns = list(dict.fromkeys(column for record in records for column in record))
    image = column(path, columns, "image", names.image)
    labels = LABELS[names.kind]
    wanted = labels.columns(path, columns, names.labels, names.classes)
    split = column(path, columns, "split", names.split, needed=False)
    theirs = sorted({str(record.get(split)) for record in records}) if split else ["train"]
    where = f"{path}, column {split!r}," if split else str(path)
    ours = {name: s for s, name in named_splits(theirs, names.splits, where).items()}
    rows: dict[str, list[tuple[str, Any]]] = {s: [] for s in ours.values()}
    missing, ignored = [], 0
    for number, record in enumerate(records, start=1):
        file = record.get(image)
        target = ours.get(str(record.get(split)) if split else "train")
        if target is None:  # a row of a split that is none of ours
            ignored += 1
            continue
        if isinstance(file, (bytes, Mapping)):
            raise EngramError(f"{path} holds pictures, not paths; load it as hf:{path}")
        cells = {name: record.get(name) for name in wanted}
        for name, cell in ((image, file), *(cells.items() if names.masks else ())):
            if cell in (None, ""):
                raise EngramError(f"{path}, row {number}: the column {name!r} is empty")
        full, *mask = (
            os.path.join(path.parent, str(cell))
            for cell in (file, *(cells.values() if names.masks else ()))
        )
        missing += [(number, one) for one in (full, *mask) if not os.path.isfile(one)]
        label = mask[0] if mask else labels.read(f"{path}, row {number}", cells)
        rows[target].append((full, label))
    if missing:
        more = f" (and {len(missing) - 1} more rows like it)" if len(missing) > 1 else ""
        raise EngramError(f"{path}, row {missing[0][0]}: {missing[0][1]} does not exist{more}")
    splits = {}
    for s, pairs in rows.items():
        told = [label for _, label in pairs]
        masks = Files(tuple(told)) if names.masks else None
        splits[s] = Found(Files(tuple(file for file, _ in pairs)), told, masks)
    return Source(splits, unsplit=not split, ignored=ignored, columns=wanted)


def _read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    records = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:  # which counts lines from here
                raise ValueError(f"line {number} column {error.colno}: {error.msg}") from error
            if not isinstance(record, dict):
                raise ValueError(f"line {number}: every line must be an object with named columns")
            records.append(record)
    return records


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = (
        require("pyarrow.parquet", extra="hub-data", purpose="A parquet table")
        .read_table(path)
        .to_pylist()
    )
    return records


TABLES = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}


# --------------------------------------------------------------------------------- arrays


def arrays(path: Path, names: Columns) -> Source:
    """An .npz file: x_train, y_train, … or train_images, train_labels, … or images, labels."""
    try:
        zipfile.ZipFile(path).close()  # np.load takes an .npy file too, which is one array
        with np.load(path, allow_pickle=False) as file:
            held = {key.lower(): _text(file[key]) for key in file.files}
    except Exception as error:  # on damaged bytes the libraries raise nearly anything
        raise EngramError(f"{path} cannot be read as .npz arrays: {error}") from error
    listed = held.get("class_names", held.get("classes"))
    classes = None if listed is None else [str(name) for name in listed]
    splits: dict[str, Found] = {}
    for ours, aliases in SPLITS.items():
        pairs = [(f"x_{a}", f"y_{a}") for a in aliases]
        pairs += [(f"{a}_images", f"{a}_labels") for a in aliases]
        for x, y in pairs:
            if x in held and y in held:
                splits[ours] = _found_arrays(f"{path}:{x}", held[x], held[y], classes, names)
    for x, y in (("images", "labels"), ("x", "y")):
        if not splits and x in held and y in held:
            found = _found_arrays(f"{path}:{x}", held[x], held[y], classes, names)
            return Source({"train": found}, classes, unsplit=True, columns=found.columns)
    if not splits:
        raise EngramError(
            f"{path} has the arrays {', '.join(held)}; expected x_train and y_train "
            "(x_test, …), train_images and train_labels, or images and labels"
        )
    return Source(splits, classes, columns=next(iter(splits.values())).columns)


def _text(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, its bytes as text: names of classes may be either."""
    if array.dtype.kind != "S":
        return array
    return np.char.decode(array, "utf-8", "backslashreplace")


def _found_arrays(
    where: str,
    images: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    classes: Sequence[str] | None,
    names: Columns,
) -> Found:
    each = LABELS[names.kind].dimensions
    if 1 in each and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim not in each or len(labels) != len(images):
        what = {1: "one each", 2: "a row each", 3: "a mask each"}
        raise EngramError(
            f"{where}: {len(images)} images need as many labels, "
            f"{' or '.join(what[n] for n in each)}; got labels of shape {labels.shape}"
        )
    rows = Arrays(_pixels(where, images), where)
    if names.masks:
        masks = Arrays(_mask_values(where, labels), f"{where}, mask")
        return Found(rows, [None] * len(labels), masks)
    if labels.ndim == 2:
        columns = classes or [str(i) for i in range(labels.shape[1])]
        if len(columns) != labels.shape[1]:
            raise EngramError(
                f"{where}: {labels.shape[1]} columns of labels, but {len(columns)} class names"
            )
        cells: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in labels]
        return Found(rows, read_labels(where, cells, None, names), columns=columns)
    named = classes if classes is not None and labels.dtype.kind in "iu" else None
    return Found(rows, read_labels(where, [{"label": label} for label in labels], named, names))


def read_labels(
    where: str,
    rows: Iterable[Mapping[str, Any]],
    classes: Sequence[str] | None,
    names: Columns,
) -> list[Any]:
    labels = LABELS[names.kind]
    return [labels.read(f"{where}: row {i}", cells, classes) for i, cells in enumerate(rows)]


def _pixels(where: str, images: npt.NDArray[Any]) -> torch.Tensor:
    """(N, H, W[, 1 or 3]) or (N, 1 or 3, H, W); uint8, or floats from 0 to 1, as uint8."""
    if images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)
    if images.ndim == 4 and images.shape[-1] == 1:
        images = images[..., 0]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] != 3):
        raise EngramError(
            f"{where} has the shape {images.shape}; expected (N, H, W), (N, H, W, 3) "
            "or (N, 3, H, W)"
        )
    if images.dtype != np.uint8 and images.size:
        top = 1 if images.dtype.kind == "f" else 255
        low, high = images.min(), images.max()
        if images.dtype.kind not in "fiu" or not (low >= 0 and high <= top):
            raise EngramError(
                f"{where} holds {images.dtype} values from {low} to {high}; "
                "expected integers from 0 to 255 or floats from 0 to 1"
            )
        images = np.rint(images * (255 / top)).astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(images))


def _mask_values(where: str, masks: npt.NDArray[Any]) -> torch.Tensor:
    """(N, H, W), in the 8 or 16 bits that a picture of one number a pixel can have."""
    low, high = (masks.min(), masks.max()) if masks.size else (0, 0)
    if masks.dtype.kind not in "biu" or not (low >= 0 and high < MASK_VALUES):
        raise EngramError(
            f"{where}: the masks hold {masks.dtype} values from {low} to {high}; "
            "expected integers from 0 to 65,535"
        )
    dtype = np.uint8 if high < 256 else np.uint16
    return torch.from_numpy(np.ascontiguousarray(masks, dtype=dtype))


def digits(names: Columns) -> Source:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; every fifth of a class is test."""
    bunch = require("sklearn.datasets", extra="demo", purpose="The dataset digits").load_digits()
    test = np.zeros(len(bunch.target), dtype=bool)
    for digit in range(10):
        test[np.flatnonzero(bunch.target == digit)[::5]] = True
    splits = {
        name: _found_arrays(f"digits/{name}", bunch.images[of] / 16, bunch.target[of], None, names)
        for name, of in (("train", ~test), ("test", test))
    }
    return Source(splits, augment="pad-crop", flip=False)
