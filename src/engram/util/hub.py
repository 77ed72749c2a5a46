"""The Hugging Face Hub, through huggingface_hub: its cache, offline mode and tokens as they are.

What goes wrong there is one sentence here. `hf:OWNER/NAME[@REVISION][/FILE][#CONTENT]` is how a
repository, or one file of it, is written wherever a path could stand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engram.errors import EngramError

PathOrHubId = str | os.PathLike[str]  # a local path, or `hf:…` for something on the Hub

PREFIX = "hf:"
REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_PLACE = re.compile(
    r"hf:(?P<repo>[^/@#]+/[^/@#]+)(?:@(?P<revision>[^/#]+))?(?:/(?P<file>[^#]*))?"
    r"(?:#(?P<content>[0-9a-f]{8,64}))?"
)


@dataclass(frozen=True)
class HubAddress:
    """A repository on the Hub or one file of it, at a revision, with a content to expect."""

    repo: str
    revision: str | None = None
    file: str | None = None
    content: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repo}{at}" + (f"/{self.file}" if self.file else "")


def is_hub_address(source: PathOrHubId) -> bool:
    return os.fspath(source).startswith(PREFIX)


def parse_hub_address(source: PathOrHubId, revision: str | None = None) -> HubAddress:
    """What `hf:…` means; a `revision` is for those that cannot stand in the text (with a /)."""
    text = os.fspath(source).replace("\\", "/")  # a path of Windows has them that way round
    found = _PLACE.fullmatch(text)
    parts = PurePosixPath(found["file"] or "").parts if found else ()
    if found is None or not REPO.fullmatch(found["repo"]) or {".", "..", "/"} & {*parts}:
        raise EngramError(
            f"{text!r} names nothing on the Hub; write hf:owner/name, hf:owner/name/FILE, or "
            "hf:owner/name@revision/FILE, with #CONTENT behind it to pin what is in the file (8 "
            "to 64 hexadecimal digits)."
        )
    place = HubAddress(found["repo"], found["revision"], "/".join(parts) or None, found["content"])
    if revision is not None and place.revision not in (None, revision):
        raise EngramError(
            f"{text!r} names the revision {place.revision!r}, but {revision!r} is asked for as "
            "well; give one of the two."
        )
    return replace(place, revision=revision or place.revision)


# Down


def fetch(
    repo: str,
    files: Iterable[str],
    revision: str | None = None,
    *,
    but: Iterable[str] = (),
    may_be_path: bool = True,
) -> Path:
    """The folder in the local cache that holds a repository's `files` (names or patterns).

    Those that `but` matches are left out.

    Files that are in the cache are not downloaded again, and are found without a network.
    Whatever goes wrong is one sentence that says what was tried.
    """
    at = f"{repo} at {revision}" if revision else repo
    by_hand = "download it elsewhere and give the path of its folder"
    none = f"There is no file or folder {repo!r}, and no" if may_be_path else "There is no"
    called = "of that name" if may_be_path else f"{repo}"
    try:
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(files), ignore_patterns=list(but)
            )
        )
    except HFValidationError as error:
        raise EngramError(f"{repo!r} is neither a path nor a Hub id (owner/name).") from error
    except GatedRepoError as error:
        raise EngramError(
            f"The Hub repository {at} is gated: accept its terms on its page and log in with "
            f"`hf auth login`, or {by_hand}."
        ) from error
    except RepositoryNotFoundError as error:
        raise EngramError(
            f"{none} Hub repository {called} that you may read; check the spelling, or log in "
            "with `hf auth login` if it is private."
        ) from error
    except RevisionNotFoundError as error:
        raise _no_revision(repo, revision) from error
    except LocalEntryNotFoundError as error:
        why = "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "no network"
        what = f"There is no file or folder {repo!r}, and as a Hub id it" if may_be_path else at
        raise EngramError(
            f"{what} is not wholly in the cache ({constants.HF_HUB_CACHE}) while "
            f"{constants.ENDPOINT} could not be asked: {why}. Connect once, or {by_hand}."
        ) from error
    except Exception as error:  # whatever the network or the disk adds: a sentence all the same
        raise EngramError(
            f"The Hub repository {at} could not be fetched from {constants.ENDPOINT}: "
            f"{_first_line(error)}. Try again, or {by_hand}."
        ) from error


def _no_revision(repo: str, revision: str | None) -> EngramError:
    return EngramError(f"The Hub repository {repo} has no revision {revision!r}.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# Up


class Uploaded(NamedTuple):
    url: str
    commit: str


def upload(
    repo: str,
    files: Mapping[str, bytes],
    *,
    message: str,
    revision: str | None = None,
    private: bool | None = None,
    replace: bool = False,
) -> Uploaded:
    """Put files into a repository, in one commit; it is made if it is not there.

    Engrams that are there under other names are refused, as no card would tell of them any more,
    or with `replace` deleted by the same commit.
    """
    if get_token() is None:
        raise EngramError(
            f"No token for {constants.ENDPOINT} was found, so nothing can be sent to {repo}; log "
            "in with `hf auth login`, or set HF_TOKEN to a token that may write. --dry-run needs "
            "none."
        )
    api = HfApi()
    with _sentences(repo, revision):
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo, revision=revision)
        others = [n for n in there if n.endswith(".safetensors") and n not in files]
        if others and not replace:
            raise EngramError(
                f"The Hub repository {repo} already holds {', '.join(others)}, which the card of "
                "this push would not tell of; push all of them together, use another repository, "
                "or delete them with --replace."
            )
        stale = [*others, *(n for n in there if n == "bundle.json" and n not in files)]
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, data) for name, data in files.items()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=message,
            revision=revision,
        )
    return Uploaded(f"{constants.ENDPOINT}/{repo}", commit.oid)


@contextmanager
def _sentences(repo: str, revision: str | None) -> Iterator[None]:
    """Whatever the Hub or the network says to a push, as one sentence."""
    end = constants.ENDPOINT
    try:
        yield
    except EngramError:
        raise
    except HFValidationError as error:
        raise EngramError(
            f"{repo!r} is no Hub id; write owner/name. {_first_line(error)}."
        ) from error
    except OfflineModeIsEnabled as error:
        raise EngramError(
            f"Nothing was sent to {repo}: offline mode is on (HF_HUB_OFFLINE). Unset it, or look "
            "at what would be sent with --dry-run."
        ) from error
    except RevisionNotFoundError as error:
        raise _no_revision(repo, revision) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise EngramError(
                f"{end} refused to let you write to {repo} ({status}): the token is wrong or may "
                "not write there; check the owner's name, and log in with `hf auth login` with a "
                "token that may write."
            ) from error
        if status == 404:
            raise EngramError(
                f"{end} knows no repository {repo} that you may write to; check the owner's name."
            ) from error
        raise EngramError(
            f"{end} did not take the push to {repo} ({status}): {_first_line(error)}. What was "
            "there is unchanged; try again."
        ) from error
    except Exception as error:  # no network, a proxy, a card that the Hub will not have
        raise EngramError(
            f"Nothing was sent to {repo}: {end} could not be asked, or did not answer as a Hub "
            f"does ({_first_line(error)}). Try again when it can be reached."
        ) from error
