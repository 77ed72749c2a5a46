"""`engram backbones get`: fetch a backbone from the Hub into its cache, and see that it can be
used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engram.backbones.load import load_backbone
from engram.backbones.read import HUB_FILES
from engram.backbones.recommended import PICO, RECOMMENDED, recommended
from engram.errors import EngramError
from engram.util import hub
from engram.util.progress import Progress, silent
from engram.vit import ViT


def get_backbone(
    name: str,
    *,
    announce: Callable[[str], object] = lambda sentence: None,
    progress: Progress = silent,
) -> tuple[ViT, Path]:
    """A backbone that is in the cache of the Hub from now on, and its folder there.

    It is loaded, so a damaged or incomplete download is an EngramError.

    Args:
        name: A name of the recommended backbones, or any Hub id.
        announce: Called with a sentence before a download.
        progress: Told how far the download is.
    """
    if name == PICO:
        raise EngramError("pico comes with the package; there is nothing to get.")
    known = recommended(name.removeprefix(hub.PREFIX))
    source = known.repo if known else name.removeprefix(hub.PREFIX)
    repo, _, revision = source.partition("@")
    if not hub.REPO.fullmatch(repo):
        names = ", ".join(backbone.name for backbone in RECOMMENDED)
        raise EngramError(f"{name!r} is neither a Hub id (owner/name) nor one of {names}.")
    if known and not known.on_this_machine:
        announce(f"{repo} takes about {known.download / 1e6:.0f} MB in the cache of the Hub.")
    folder = hub.fetch(repo, HUB_FILES, revision or None, may_be_path=False, progress=progress)
    backbone = load_backbone(source)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    if known and parameters != known.parameters:
        raise EngramError(
            f"{repo} has {parameters:,} parameters; {known.parameters:,} were expected. It is not "
            f"the model that {known.name} stands for; delete {folder} and get it again."
        )
    return backbone, folder
