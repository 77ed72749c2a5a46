"""Folders of images: one per class, of images and of their masks, or of good images."""

from __future__ import annotations

import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engram.data.labels import GOOD
from engram.data.source import (
    SPLITS,
    DataRequest,
    Files,
    FoundData,
    FoundSplit,
    Rows,
    StoredImage,
    match_splits,
    usual_split,
)
from engram.errors import EngramError, Notice, flag
from engram.images.decode import HEIC_NEEDS, HEIC_SUFFIXES, can_read_heic, image_size
from engram.images.masks import Legend, read_mask
from engram.util.text import counted, join_names

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".jp2", ".avif", *HEIC_SUFFIXES),
)
# Folders that a system or another program makes for itself, next to those that begin with . or __.
_SYSTEM_FOLDERS = {"@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
_MASK_FOLDERS = ("ground_truth", "masks")
#: Of the masks of defects: pixels of good images, wrong ones, and others of the same image.
DEFECTS = Legend((0, 1, 2), 255)
_HIDDEN, _HEIC, _LOOSE = "hidden", "HEIC", "outside of the class folders"


# A folder per class


def read_class_folders(root: Path, request: DataRequest) -> FoundData:
    """Read a folder per class, or a folder per split that has a folder per class."""
    if request.kind != "classification":
        raise EngramError(
            f"{root} is a folder of class folders, which gives each image one class; "
            f"{request.kind} needs a table with columns of labels, or an .npz file."
        )
    subfolders = _subfolders(root)
    if [path.name for path in subfolders] == ["images", "masks"]:
        raise EngramError(
            f"{root} has the folders images/ and masks/, as data for segmentation has; give "
            f"{flag('kind', 'segmentation')}, or rename them if they are two classes."
        )
    splits = [path for path in subfolders if usual_split(path.name)]
    others = [path.name for path in subfolders if path not in splits]
    for path in splits:
        if set(others) & {below.name for below in _subfolders(path)}:
            raise EngramError(
                f"{root} has class folders next to {path.name}/, which has folders of the same "
                f"names; move {join_names(others, 3)} into {root / 'train'}/."
            )
    # "train" can be a class of vehicles: a train/ that is a split has class folders in it.
    in_train = [path for path in splits if usual_split(path.name) == "train" and _subfolders(path)]
    if splits and (not others or in_train):
        return _read_splits(root, splits, _read_classes, _loose_files(root))
    return _found({"train": _read_classes(root)})


def _read_classes(root: Path) -> FoundSplit:
    """The images below every class folder."""
    folders, loose = _subfolders(root), _loose_files(root)
    if not folders:
        if loose[_LOOSE] or loose[_HEIC]:
            raise EngramError(
                f"{root} has images but no class folders; put them into a folder per class."
            )
        raise EngramError(f"{root} has no images; put a folder of images per class into it.")
    known: dict[Hashable, Path] = {}
    for folder in folders:
        other = known.setdefault(_identity(folder), folder)
        if other != folder:
            raise EngramError(f"{folder} and {other} are the same folder; remove one of the two.")
    found = _labelled(folders, classes=True)
    return replace(found, left_out=loose + found.left_out)


def _loose_files(root: Path) -> Counter[str]:
    """The files next to class folders or folders of splits, none of which are used."""
    images, others = _sorted_out(_scan(os.fspath(root))[0])
    return others + Counter({_LOOSE: len(images)})


def _no_images(folder: Path, what: str, files: Sequence[str], others: Counter[str]) -> EngramError:
    if others[_HEIC]:
        shown = next(path for path in files if _suffix(path) in HEIC_SUFFIXES)
        count = counted(others[_HEIC], "HEIC image")
        return EngramError(f"{folder} has {count}, such as {shown}, and {HEIC_NEEDS}.")
    names = [f"{count:,} {kind}" for kind, count in others.most_common(4)]
    only = f", only {', '.join(names)}{', …' * (len(others) > 4)}" if others else ""
    return EngramError(f"{folder} {what}{only}; add some or remove the folder.")


# Images and masks


def read_mask_folders(root: Path, masks: Path | None = None) -> FoundData:
    """Read images and masks from two trees of the same shape, with a folder per split or without.

    Without `masks` both trees are in `root`, or in every split's folder: images/ and masks/.
    """
    if masks is None and {"images", "masks"} <= {path.name for path in _subfolders(root)}:
        root, masks = root / "images", root / "masks"
    folders = _subfolders(root)
    splits = [path for path in folders if usual_split(path.name)]
    if masks is None:
        for folder in splits or [root]:
            if not all((folder / name).is_dir() for name in ("images", "masks")):
                raise _no_masks(folder)
        return _read_splits(root, splits, lambda one: _pair_masks(one / "images", one / "masks"))
    if not masks.is_dir():
        raise EngramError(f"{masks} is not a folder; give the folder of the masks.")
    if splits and splits == folders:
        return _read_splits(root, splits, lambda one: _pair_masks(one, masks / one.name))
    return _found({"train": _pair_masks(root, masks)})


def _no_masks(root: Path) -> EngramError:
    return EngramError(
        f"{root} has no masks: segmentation needs one for every image. Put images and masks of the "
        f"same names into two folders, such as {root}/images/1.jpg and {root}/masks/1.png, or give "
        f"two folders of the same shape as IMAGES::MASKS. A mask is a PNG with the number of a "
        "class in every pixel; docs/data.md, section Masks, shows more."
    )


def _pair_masks(images: Path, masks: Path) -> FoundSplit:
    """Every image with the mask of the same name, whatever the suffix, in the other tree."""
    (files,) = _files_below([images])
    paths, left_out = _sorted_out(files)
    if not paths:
        raise _no_images(images, "contains no images", files, left_out)
    by_stem: dict[str, str] = {}
    for path in _masks_in(masks, {os.path.dirname(_stem(path, images)) for path in paths}):
        stem = _stem(path, masks)
        if stem in by_stem:
            raise EngramError(f"{by_stem[stem]} and {path} are masks of the same image; keep one.")
        by_stem[stem] = path
    missing = [path for path in paths if _stem(path, images) not in by_stem]
    if missing:
        more = len(missing) - 1
        verb = "does" if more == 1 else "do"
        others = f", nor {verb} {counted(more, 'other image')}" if more else ""
        raise EngramError(f"{missing[0]} has no mask of the same name in {masks}{others}.")
    found = Files(tuple(by_stem[_stem(path, images)] for path in paths))
    return FoundSplit(Files(tuple(paths)), [None] * len(paths), found, left_out=left_out)


def _masks_in(masks: Path, folders: set[str]) -> list[str]:
    """The masks in those folders, which may be links to one and the same."""
    found = [os.path.join(masks, folder) for folder in sorted(folders)]
    files = [path for folder in found if os.path.isdir(folder) for path in _scan(folder)[0]]
    return _sorted_out(files)[0]


def _stem(path: str, root: Path) -> str:
    return os.path.splitext(os.path.relpath(path, root))[0]


# Good images, and others to test with
#
#     DATA/*.png                               good images
#     DATA/good/*.png, DATA/scratch/*.png      good images, and others, which are the test split
#     DATA/train/good/*.png, test/good/*.png, test/scratch/*.png               as MVTec AD has it
#     DATA/ground_truth/scratch/000_mask.png   the mask of test/scratch/000.png, if there are some


def read_good_folders(root: Path) -> FoundData:
    """Read good images, with splits or without, and images of defects with their masks."""
    masks = next((path for path in _subfolders(root) if path.name in _MASK_FOLDERS), None)
    folders = [path for path in _subfolders(root) if path != masks]
    splits = [path for path in folders if usual_split(path.name)]
    if splits:
        return _read_splits(root, splits, lambda split: _read_good(split, masks))
    good = [path for path in folders if path.name.lower() in GOOD]
    if not good:
        return _found({"train": _read_good(root, None)})
    found = {"train": _labelled(good)}
    others = [path for path in folders if path not in good]
    if others:
        found["test"] = _labelled(others, masks)
    return _found(found, ["test"] * bool(others))


def _read_good(root: Path, masks: Path | None) -> FoundSplit:
    """One split: images as they are, all of them good, or in folders that say what is wrong."""
    folders = _subfolders(root)
    if not folders:
        images, others = _sorted_out(_scan(os.fspath(root))[0])
        if not images:
            raise EngramError(f"{root} has no images; put good images into it.")
        return FoundSplit(Files(tuple(images)), [GOOD[0]] * len(images), left_out=others)
    if not any(path.name.lower() in GOOD for path in folders):
        listed = join_names([path.name for path in folders], 4)
        raise EngramError(
            f"{root} has the folders {listed}, and none of them is called good; put the good "
            f"images into {root / GOOD[0]}/, or give a folder of nothing but good images."
        )
    return _labelled(folders, masks)


def _labelled(
    folders: Sequence[Path], masks: Path | None = None, classes: bool = False
) -> FoundSplit:
    """The images in folders, each labelled with the name of its folder; a class needs some."""
    paths: list[str] = []
    labels: list[str] = []
    left_out: Counter[str] = Counter()
    for folder, files in zip(folders, _files_below(folders), strict=True):
        images, others = _sorted_out(files)
        if classes and not images:
            raise _no_images(folder, "is a class without images of its own", files, others)
        paths += images
        labels += [folder.name] * len(images)
        left_out += others
    found = None if masks is None else _defect_masks(paths, labels, masks)
    return FoundSplit(Files(tuple(paths)), labels, found, left_out=left_out)


def _defect_masks(paths: Sequence[str], labels: Sequence[str], root: Path) -> DefectMasks | None:
    """The masks of images, where every image that is not good has one; else None."""
    found: list[str] = []
    for path, label in zip(paths, labels, strict=True):
        if label.lower() in GOOD:
            found.append("")
            continue
        names = [root / label / f"{Path(path).stem}{end}.png" for end in ("_mask", "")]
        mask = next((str(name) for name in names if name.is_file()), None)
        if mask is None:
            return None
        found.append(mask)
    return DefectMasks(tuple(paths), tuple(found)) if any(found) else None


@dataclass(frozen=True)
class DefectMasks(Rows):
    """Masks with the values of `DEFECTS`, from black and white files; good images have none."""

    images: tuple[str, ...]
    paths: tuple[str, ...]

    def read(self, row: int) -> StoredImage:
        if not self.paths[row]:
            width, height = image_size(self.images[row])
            return np.zeros((height, width), dtype=np.uint8)
        return np.where(read_mask(self.paths[row]) > 0, 1, 2).astype(np.uint8)

    def row_name(self, row: int) -> str:
        return self.paths[row] or self.images[row]


def _read_splits(
    root: Path,
    folders: Sequence[Path],
    read: Callable[[Path], FoundSplit],
    loose: Mapping[str, int] | None = None,
) -> FoundData:
    """The splits in folders with their usual names."""
    paths = {path.name: path for path in folders}
    names = match_splits(paths, {}, str(root))
    return _found({split: read(paths[name]) for split, name in names.items()}, paths, loose)


def _found(
    splits: dict[str, FoundSplit],
    folders: Collection[str] = (),
    loose: Mapping[str, int] | None = None,
) -> FoundData:
    left_out = sum((found.left_out for found in splits.values()), Counter(loose))
    _tell_of_heic(left_out)
    names = [f"{name}/" for split in SPLITS for name in folders if usual_split(name) == split]
    by = f"the folder{'s' * (len(names) > 1)} {' and '.join(names)}" if names else ""
    return FoundData(splits, split_by=by, left_out=left_out)


# Files below a folder


def image_paths(sources: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The paths of images, and of those in folders at any depth; none at all is an EngramError."""
    paths: list[str] = []
    for source in sources:
        if not os.path.isdir(source):
            paths.append(os.fspath(source))
            continue
        (files,) = _files_below([Path(source)])
        images, others = _sorted_out(files)
        _tell_of_heic(others)
        paths += images
    if not paths:
        raise EngramError("No image was given; give the paths of images, or of a folder of them.")
    return paths


def _files_below(roots: Sequence[Path]) -> list[list[str]]:
    """The files below each root. Every folder is visited once, however many links lead to it.

    Links are followed after everything else, so a file belongs to the root that it is really in.
    A link to a folder that contains a root is not followed.
    """
    seen = {_identity(parent) for root in roots for parent in root.resolve().parents}
    files: list[list[str]] = [[] for _ in roots]
    waiting = deque((os.fspath(root), below) for root, below in zip(roots, files, strict=True))
    while waiting:
        folder, below = waiting.popleft()
        if (identity := _identity(folder)) not in seen:
            seen.add(identity)
            names, folders, links = _scan(folder)
            below += names
            waiting.extendleft((path, below) for path in folders)
            waiting.extend((path, below) for path in links)
    return files


def _scan(folder: str) -> tuple[list[str], list[str], list[str]]:
    """The paths of files, of folders that are not hidden, and of links to such folders, sorted."""
    files: list[str] = []
    folders: list[str] = []
    links: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not _is_folder(entry):
                    files.append(entry.path)
                elif not _is_hidden(entry.name):
                    (links if entry.is_symlink() else folders).append(entry.path)
    except OSError as error:
        raise EngramError(
            f"{error.filename} cannot be read ({error.strerror}); make it readable or remove it."
        ) from None
    return files, folders, links


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(folder: str | Path) -> Hashable:
    """A key of a folder, equal for all paths to it."""
    status = os.stat(folder)
    # Some file systems do not number their files.
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(folder)


def _sorted_out(files: Iterable[str]) -> tuple[list[str], Counter[str]]:
    """Sort files into visible images, in order, and counts of everything else."""
    images: list[str] = []
    others: Counter[str] = Counter()
    for path in files:
        suffix = _suffix(path)
        if os.path.basename(path).startswith("."):
            others[_HIDDEN] += 1
        elif suffix not in SUFFIXES:
            others[suffix or "without a suffix"] += 1
        elif suffix in HEIC_SUFFIXES and not can_read_heic():
            others[_HEIC] += 1
        else:
            images.append(path)
    return sorted(images), others


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _tell_of_heic(left_out: Counter[str]) -> None:
    if left_out[_HEIC]:
        notice = f"Left out: {counted(left_out[_HEIC], 'HEIC image')}; {HEIC_NEEDS}."
        warnings.warn(notice, Notice, stacklevel=2)


def _subfolders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not _is_hidden(p.name))


def _is_hidden(name: str) -> bool:
    """Whether a program made this folder for itself, such as .ipynb_checkpoints or __MACOSX."""
    return name.startswith((".", "__")) or name in _SYSTEM_FOLDERS
