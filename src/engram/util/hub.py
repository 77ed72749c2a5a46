"""The Hugging Face Hub, through huggingface_hub: its cache, tokens and offline mode work as usual.

`hf:OWNER/NAME[@REVISION][/FILE][#CONTENT]` is the address of a repository or of one file in it, and
may be given wherever a path is expected. Whatever goes wrong is an EngramError.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    errors,
    get_token,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils.tqdm import tqdm

from engram.errors import EngramError, flag
from engram.util.progress import Progress
from engram.util.text import explained, first_line

PathOrHubId = str | os.PathLike[str]  # a local path, or `hf:…` for something on the Hub

PREFIX = "hf:"
REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ADDRESS = re.compile(
    r"hf:(?P<repo>[^/@#]+/[^/@#]+)(?:@(?P<revision>[^/#]+))?(?:/(?P<file>[^#]*))?"
    r"(?:#(?P<content>[0-9a-f]{8,64}))?"
)


@dataclass(frozen=True)
class HubAddress:
    """A repository on the Hub or one file of it, perhaps at a revision and with a content hash."""

    repo: str
    revision: str | None = None
    file: str | None = None
    content: str | None = None  # the beginning of the hash that the file must have

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repo}{at}" + (f"/{self.file}" if self.file else "")


def is_hub_address(source: PathOrHubId) -> bool:
    return os.fspath(source).startswith(PREFIX)


def parse_hub_address(source: PathOrHubId, revision: str | None = None) -> HubAddress:
    """The parts of `hf:…`. `revision` is for one that the address cannot hold (with a /)."""
    text = os.fspath(source).replace("\\", "/")  # a Windows path has turned the slashes around
    match = _ADDRESS.fullmatch(text)
    parts = PurePosixPath(match["file"] or "").parts if match else ()
    if match is None or not REPO.fullmatch(match["repo"]) or {".", "..", "/"} & {*parts}:
        raise EngramError(
            f"{text!r} is not an address on the Hub; write hf:owner/name, hf:owner/name/FILE or "
            "hf:owner/name@revision/FILE, and append #CONTENT (8 to 64 hexadecimal digits) to pin "
            "what is in the file."
        )
    address = HubAddress(
        match["repo"], match["revision"], "/".join(parts) or None, match["content"]
    )
    if revision is not None and address.revision not in (None, revision):
        raise EngramError(
            f"{text!r} names the revision {address.revision!r}, but the revision {revision!r} is "
            "given as well; give one of the two."
        )
    return replace(address, revision=revision or address.revision)


# Access


@dataclass(frozen=True)
class Access:
    """Options of requests to the Hub, with the names and meaning of huggingface_hub."""

    token: str | bool | None = None  # by default that of `hf auth login` or HF_TOKEN
    cache_dir: PathOrHubId | None = None  # by default HF_HUB_CACHE
    local_files_only: bool = False
    force_download: bool = False


_ACCESS: ContextVar[Access] = ContextVar("access", default=Access())  # noqa: B039 (it is frozen)


@contextmanager
def access(how: Access) -> Iterator[None]:
    """Ask the Hub like this inside: for engrams, and for the backbone that they name."""
    before = _ACCESS.set(how)
    try:
        yield
    finally:
        _ACCESS.reset(before)


def own_repo(name: str) -> str:
    """`owner/name` for a name without an owner: the user whom the token belongs to."""
    if "/" in name:
        return name
    with explained(lambda error: _upload_problem(name, None, error)):
        owner: str = HfApi(token=_token_to_write(name)).whoami()["name"]
    return f"{owner}/{name}"


def _token_to_write(repo: str) -> str:
    given = _ACCESS.get().token
    token = get_token() if given is None or given is True else given
    if not token:
        raise EngramError(
            f"No token for {constants.ENDPOINT} was found, so nothing can be sent to {repo}; log "
            "in with `hf auth login`, or set HF_TOKEN to a token with write access. `engram push "
            "--dry-run` shows what would be sent, and needs no token."
        )
    return token


# Download


def fetch(
    repo: str,
    files: Iterable[str],
    revision: str | None = None,
    *,
    ignore: Iterable[str] = (),
    may_be_path: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Download files of a repository, by names or patterns, into the local cache: the folder there.

    Files that are in the cache are not downloaded again, and are found without a network. Files
    that the repository does not have are missing in the folder. `may_be_path` says, for the error
    message, that `repo` could have been meant as a path. `progress` is told the bytes so far, in
    place of the bars of huggingface_hub.
    """
    with explained(lambda error: _fetch_problem(repo, revision, may_be_path, error)):
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(files), ignore_patterns=list(ignore),
                tqdm_class=None if progress is None else _reporting_bar(progress, repo),
                **vars(_ACCESS.get()),
            )
        )  # fmt: skip


def is_cached(repo: str, files: Iterable[str]) -> bool:
    """Whether all these files of a repository are in the local cache; nothing is asked."""
    return all(isinstance(try_to_load_from_cache(repo, file), str) for file in files)


def _reporting_bar(progress: Progress, repo: str) -> type[tqdm]:
    """A progress bar for huggingface_hub that prints nothing, and reports the bytes instead."""

    one_at_a_time = Lock()  # files are downloaded by several threads

    class _ReportingBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            options |= {"file": io.StringIO(), "disable": False}
            options.pop("name", None)
            # Not as huggingface_hub makes its own, which an environment variable switches off.
            super(tqdm, self).__init__(*args, **options)

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            self._report()
            return shown

        def refresh(self, *args: Any, **options: Any) -> bool | None:
            """Called when a file with its size is added, before its first byte."""
            self._report()
            return True

        def _report(self) -> None:
            if self.unit == "B" and self.total:
                done, total = min(int(self.n), int(self.total)), int(self.total)
                note = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
                with one_at_a_time:
                    progress(f"downloading {repo}", done, total, note)

    return _ReportingBar


def _fetch_problem(repo: str, revision: str | None, may_be_path: bool, error: Exception) -> str:
    """A sentence about a download that failed."""
    at = f"{repo} at {revision}" if revision else repo
    by_hand = "download it elsewhere and give the path of its folder"
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is neither a path nor a Hub id (owner/name)."
    if isinstance(error, errors.GatedRepoError):
        return (
            f"The Hub repository {at} is gated: accept its terms on its page and log in with "
            f"`hf auth login`, or {by_hand}."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        no = f"There is no file or folder {repo!r}, and no Hub repository of that name"
        no = no if may_be_path else f"There is no Hub repository {repo}"
        return (
            f"{no} that you may read; check the spelling, or log in with `hf auth login` if it is "
            "private."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The Hub repository {repo} has no revision {revision!r}."
    if isinstance(error, errors.LocalEntryNotFoundError):
        how = _ACCESS.get()
        why = "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "no network"
        why = flag("local_files_only", True) if how.local_files_only else why
        what = f"There is no file or folder {repo!r}, and as a Hub id it" if may_be_path else at
        return (
            f"{what} is not completely in the cache ({how.cache_dir or constants.HF_HUB_CACHE}), "
            f"and {constants.ENDPOINT} could not be reached: {why}. Connect once, or {by_hand}."
        )
    return (
        f"The Hub repository {at} could not be fetched from {constants.ENDPOINT}: "
        f"{first_line(error)}. Try again, or {by_hand}."
    )


# Upload


def upload(
    repo: str,
    files: Mapping[str, bytes],
    *,
    message: str,
    revision: str | None = None,
    private: bool | None = None,
    replace: bool = False,
) -> tuple[str, str]:
    """Put files into a repository in one commit; returns its address, and the commit.

    The repository is created if needed.

    Other engrams in the repository are an error, because the new card would not describe them.
    With `replace` they are deleted in the same commit.
    """
    api = HfApi(token=_token_to_write(repo))
    with explained(lambda error: _upload_problem(repo, revision, error)):
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        present = api.list_repo_files(repo, revision=revision)
        others = [n for n in present if n.endswith(".safetensors") and n not in files]
        if others and not replace:
            raise EngramError(
                f"The Hub repository {repo} already holds {', '.join(others)}, which the card of "
                "this push would not describe; push all of them at once, use another repository, "
                f"or delete them with {flag('replace', True)}."
            )
        stale = [*others, *(n for n in present if n == "bundle.json" and n not in files)]
        commit = api.create_commit(
            repo,
            [
                *(CommitOperationAdd(name, data) for name, data in files.items()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=message,
            revision=revision,
        )
    return f"{constants.ENDPOINT}/{repo}", commit.oid


def _upload_problem(repo: str, revision: str | None, error: Exception) -> str:
    """A sentence about an upload that failed."""
    endpoint = constants.ENDPOINT
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is not a Hub id; write owner/name. {first_line(error)}."
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"Nothing was sent to {repo}: offline mode is on (HF_HUB_OFFLINE). Unset it, or see "
            "what would be sent with `engram push --dry-run`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The Hub repository {repo} has no revision {revision!r}."
    if not isinstance(error, errors.HfHubHTTPError):  # no network, a proxy, a card it rejects
        return (
            f"Nothing was sent to {repo}: {endpoint} could not be reached, or did not answer like "
            f"the Hub ({first_line(error)}). Try again when it can be reached."
        )
    status = error.response.status_code
    if status in (401, 403):
        return (
            f"{endpoint} refused to let you write to {repo} ({status}): the token is wrong or has "
            "no write access there; check the owner's name, and log in with `hf auth login` with "
            "a token that has write access."
        )
    if status == 404:
        return f"{endpoint} has no repository {repo} that you may write to; check the owner's name."
    return (
        f"{endpoint} rejected the push to {repo} ({status}): {first_line(error)}. The repository "
        "is unchanged; try again."
    )
