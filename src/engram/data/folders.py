"""Folders of images: a folder per class, or a tree of images and a tree of their masks."""

import os
from collections.abc import Mapping
from pathlib import Path

from engram.data.source import DataRequest, Files, FoundData, FoundSplit, match_splits, split_of
from engram.errors import EngramError

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".jp2", ".avif"),
)


# A folder per class


def read_class_folders(root: Path, request: DataRequest) -> FoundData:
    """Read a folder per class, or a folder per split that has a folder per class."""
    if request.kind != "classification":
        raise EngramError(
            f"{root} is a folder of class folders, which gives each image one class; "
            f"{request.kind} needs a table with columns of labels, or an .npz file."
        )
    subfolders = _subfolders(root)
    splits = {path.name: path for path in subfolders if split_of(path.name)}
    _refuse_classes_next_to_splits(
        root, [p.name for p in subfolders if p.name not in splits], splits
    )
    # "train" can be a class of vehicles: a train/ that is a split has class folders in it.
    in_train = [p for name, p in splits.items() if split_of(name) == "train" and _subfolders(p)]
    has_splits = bool(splits) and (len(splits) == len(subfolders) or bool(in_train))
    if has_splits:
        names = match_splits(splits, {}, str(root))
        found = {split: _read_classes(splits[name]) for split, name in names.items()}
    else:
        found = {"train": _read_classes(root)}
    return _found(found, unsplit=not has_splits)


def _refuse_classes_next_to_splits(
    root: Path, others: list[str], splits: Mapping[str, Path]
) -> None:
    """Class folders next to a split that has the same classes: half of a training split."""
    for name, path in splits.items():
        if set(others) & {below.name for below in _subfolders(path)}:
            shown = " and ".join(others) if len(others) < 4 else f"{', '.join(others[:3])}, …"
            raise EngramError(
                f"{root} has class folders next to {name}/, which has folders of the same names; "
                f"move {shown} into {root / 'train'}/."
            )


def _read_classes(root: Path) -> tuple[FoundSplit, int]:
    """The images below every class folder, and how many other files there are."""
    paths: list[str] = []
    labels: list[str] = []
    ignored = 0
    folders = _subfolders(root)
    if not folders:
        if any(path.suffix.lower() in SUFFIXES for path in root.iterdir()):
            raise EngramError(
                f"{root} has images but no class folders; put them into a folder per class."
            )
        raise EngramError(f"{root} is an empty folder; put a folder of images per class into it.")
    for folder in folders:
        images, others = images_below(folder)
        if not images:
            raise EngramError(f"{folder} is a class without images; add some or remove the folder.")
        paths += images
        labels += [folder.name] * len(images)
        ignored += others
    return FoundSplit(Files(tuple(paths)), labels), ignored


# Images and masks


def read_mask_folders(root: Path, masks: Path | None) -> FoundData:
    """Read images and masks from two trees of the same shape, with a folder per split or without.

    Without `masks` both trees are in `root`: images/ and masks/, or these two in every split's
    folder.
    """
    if masks is not None:
        return _read_trees(root, masks)
    subfolders = {path.name: path for path in _subfolders(root)}
    if {"images", "masks"} <= subfolders.keys():
        return _read_trees(subfolders["images"], subfolders["masks"])
    splits = {name: path for name, path in subfolders.items() if split_of(name)}
    if not splits:
        raise EngramError(
            f"{root} has no folders images/ and masks/; put images and masks of the same names "
            "there, or give two folders of the same shape as IMAGES::MASKS."
        )
    found = {}
    for split, name in match_splits(splits, {}, str(root)).items():
        for needed in ("images", "masks"):
            if not (splits[name] / needed).is_dir():
                raise EngramError(f"{splits[name]} has no folder {needed}/.")
        found[split] = _pair_masks(splits[name] / "images", splits[name] / "masks")
    return _found(found)


def _read_trees(images: Path, masks: Path) -> FoundData:
    if not masks.is_dir():
        raise EngramError(f"{masks} is not a folder; give the folder of the masks.")
    names = [path.name for path in _subfolders(images)]
    if not names or not all(split_of(name) for name in names):
        return _found({"train": _pair_masks(images, masks)}, unsplit=True)
    splits = match_splits(names, {}, str(images))
    return _found({s: _pair_masks(images / name, masks / name) for s, name in splits.items()})


def _pair_masks(images: Path, masks: Path) -> tuple[FoundSplit, int]:
    """Every image with the mask of the same name, whatever the suffix, in the other tree."""
    paths, ignored = images_below(images)
    if not paths:
        raise EngramError(f"{images} contains no images.")
    by_stem: dict[str, str] = {}
    for path in images_below(masks)[0]:
        stem = _stem(path, masks)
        if stem in by_stem:
            raise EngramError(f"{by_stem[stem]} and {path} are masks of the same image; keep one.")
        by_stem[stem] = path
    missing = [path for path in paths if _stem(path, images) not in by_stem]
    if missing:
        others = f", nor do {len(missing) - 1} other images" if len(missing) > 1 else ""
        raise EngramError(f"{missing[0]} has no mask of the same name in {masks}{others}.")
    found = Files(tuple(by_stem[_stem(path, images)] for path in paths))
    return FoundSplit(Files(tuple(paths)), [None] * len(paths), found), ignored


def _stem(path: str, root: Path) -> str:
    return os.path.splitext(os.path.relpath(path, root))[0]


def _found(splits: Mapping[str, tuple[FoundSplit, int]], unsplit: bool = False) -> FoundData:
    return FoundData(
        {split: found for split, (found, _) in splits.items()},
        unsplit=unsplit,
        ignored=sum(ignored for _, ignored in splits.values()),
    )


# Files below a folder


def images_below(folder: Path) -> tuple[list[str], int]:
    """The images in a folder at any depth, sorted, and how many other files there are.

    Hidden files count as other files. Hidden folders are skipped, links to folders are followed.
    """
    files: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=_refuse_unreadable, followlinks=True):
        folders[:] = [n for n in folders if not (_is_hidden(n) or _is_cycle(Path(parent, n)))]
        files += [os.path.join(parent, name) for name in names]
    images = [
        path
        for path in files
        if os.path.splitext(path)[1].lower() in SUFFIXES
        and not os.path.basename(path).startswith(".")
    ]
    return sorted(images), len(files) - len(images)


def _subfolders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not _is_hidden(p.name))


def _is_hidden(name: str) -> bool:
    """Whether a program made this folder for itself, such as .ipynb_checkpoints or __MACOSX."""
    return name.startswith((".", "__"))


def _is_cycle(folder: Path) -> bool:
    """Whether this is a link to a folder that contains it."""
    return folder.is_symlink() and folder.resolve() in {up.resolve() for up in folder.parents}


def _refuse_unreadable(error: OSError) -> None:
    raise EngramError(
        f"{error.filename} cannot be read ({error.strerror}); make it readable or remove it."
    )
