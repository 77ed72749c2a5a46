"""`from_pretrained` and `push_to_hub` of a model: what they read and write is a bundle.

The engrams, and not the backbone, which stays where it is.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.store.bundles import is_bundle, read_engrams, write_bundle
from engram.store.engram import Engram
from engram.store.remote import MANIFEST, local_path
from engram.store.sharing import push
from engram.util import hub
from engram.util.hub import PathOrHubId

LOADING = ("backbone", "revision", "token", "cache_dir", "local_files_only", "force_download")
PUSHING = ("commit_message", "private", "token", "branch", "backbone", "replace")
_INSTEAD = {  # of options that other libraries have
    "config": "the classes of every task are in its engram",
    "device_map": "move the model with .to(device)",
    "map_location": "move the model with .to(device)",
    "dtype": "give a backbone of that type with backbone=",
    "torch_dtype": "give a backbone of that type with backbone=",
    "trust_remote_code": "no code is ever downloaded",
    "subfolder": "a repository is one bundle",
    "create_pr": "push to a branch with branch=, and open the pull request on the Hub",
    "revision": "the branch to push to is given with branch=",
    "license": "engram.push has it",
}


def read(source: PathOrHubId, revision: str | None) -> Sequence[Engram]:
    """The engrams of a bundle here or on the Hub."""
    found = _path_or_address(source)
    _check_folder(Path(found))
    return read_engrams([local_path(found, revision)])


def push_bundle(
    engrams: Sequence[Engram], repo_id: str, *, token: str | None, **options: Any
) -> str:
    """Send engrams as a bundle to the Hub, with the options of `push`; returns the commit's URL."""
    with tempfile.TemporaryDirectory() as folder, hub.access(hub.Access(token)):
        write_bundle(engrams, Path(folder) / "bundle", overwrite=True)
        sent = push(Path(folder) / "bundle", hub.own_repo(repo_id), **options)
    return f"{sent.url}/commit/{sent.commit}"


def _path_or_address(source: PathOrHubId) -> PathOrHubId:
    """What exists here is a path, as for huggingface_hub; `owner/name` is else on the Hub."""
    name = os.fspath(source)
    if hub.is_hub_address(source) or Path(source).exists():
        return source
    if isinstance(source, str) and re.match(rf"{hub.REPO.pattern}(?:@|$)", name):
        return f"{hub.PREFIX}{name}"
    raise EngramError(
        f"There is no folder or file {name!r}, and it is no repository on the Hub (owner/name); "
        "save_pretrained writes a bundle."
    )


def _check_folder(path: Path) -> None:
    """Refuse a folder that is no bundle; the folder of a ViT is easily taken for one."""
    if not path.is_dir() or is_bundle(path):
        return
    if (path / "config.json").is_file():
        raise EngramError(
            f"{path} is a ViT, and no bundle of tasks; a model without tasks is "
            f"engram.MemoryViT(engram.load_backbone({str(path)!r}))."
        )
    raise EngramError(
        f"{path} has no {MANIFEST}, so it is no bundle; save_pretrained and `engram compose` "
        "write one."
    )


def refuse(method: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse options that this method does not have, by what to do in place of the first."""
    for name in given:
        instead = _INSTEAD.get(name, f"it takes {', '.join(known)}")
        raise EngramError(f"{method} does not take {name}: {instead}.")
