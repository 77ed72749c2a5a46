"""The Hugging Face Hub, through huggingface_hub: its cache, offline mode and tokens as they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engram.errors import EngramError


def fetch(repo: str, files: Iterable[str], revision: str | None = None) -> Path:
    """The folder in the local cache that holds a repository's `files` (names or patterns).

    Files that are in the cache are not downloaded again, and are found without a network.
    Whatever goes wrong is one sentence that says what was tried.
    """
    at = f"{repo} at {revision}" if revision else repo
    by_hand = "download it elsewhere and give the path of its folder"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except HFValidationError as error:
        raise EngramError(f"{repo!r} is neither a path nor a Hub id (owner/name).") from error
    except GatedRepoError as error:
        raise EngramError(
            f"The Hub repository {at} is gated: accept its terms on its page and log in with "
            f"`hf auth login`, or {by_hand}."
        ) from error
    except RepositoryNotFoundError as error:
        raise EngramError(
            f"There is no file or folder {repo!r}, and no Hub repository of that name that you "
            "may read; check the spelling, or log in with `hf auth login` if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise EngramError(f"The Hub repository {repo} has no revision {revision!r}.") from error
    except LocalEntryNotFoundError as error:
        why = "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "no network"
        raise EngramError(
            f"There is no file or folder {repo!r}, and as a Hub id it is not wholly in the cache "
            f"({constants.HF_HUB_CACHE}) while {constants.ENDPOINT} could not be asked: {why}. "
            f"Connect once, or {by_hand}."
        ) from error
    except Exception as error:  # whatever the network or the disk adds: a sentence all the same
        raise EngramError(
            f"The Hub repository {at} could not be fetched from {constants.ENDPOINT}: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. "
            f"Try again, or {by_hand}."
        ) from error
