"""A model as huggingface_hub's users expect it: from_pretrained, save_pretrained, push_to_hub.

The names and their options mean what they mean in huggingface_hub's `ModelHubMixin`. What they read
and write is a bundle (`store/bundles.py`): the engrams, and not the trunk, which stays where it is.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from engram.composition import Composition
from engram.errors import EngramError
from engram.store.bundles import is_bundle, load_trunk_of, read_engrams, write_bundle
from engram.store.engram import Engram, TrunkInfo
from engram.store.fitting import in_order
from engram.store.remote import MANIFEST, local_path
from engram.store.sharing import push
from engram.util import hub
from engram.util.hub import PathOrHubId
from engram.vit import ViT

_LOADING = ("trunk", "revision", "token", "cache_dir", "local_files_only", "force_download")
_PUSHING = ("commit_message", "private", "token", "branch", "trunk", "replace")
_INSTEAD = {  # of options that other libraries have
    "config": "the classes of every task are in its engram",
    "device_map": "move the model with .to(device)",
    "map_location": "move the model with .to(device)",
    "dtype": "give a trunk of that type with trunk=",
    "torch_dtype": "give a trunk of that type with trunk=",
    "trust_remote_code": "no code is ever downloaded",
    "subfolder": "a repository is one bundle",
    "create_pr": "push to a branch with branch=, and open the pull request on the Hub",
    "revision": "the branch to push to is given with branch=",
    "license": "engram.push has it",
}


class Pretrained(Composition):
    """What `MemoryViT` shares with other models of the Hub."""

    @property
    def config(self) -> dict[str, Any]:
        """What the model is, as JSON can hold it: trunk, preprocessing, and the spec of every task.

        Examples:
            >>> model.config["tasks"]["flowers"]["classes"]
            ['rose', 'tulip']
        """
        specs = {name: task.spec.recorded() for name, task in self.tasks.items()}
        return {
            "model_type": "engram",
            "trunk": _listed(asdict(TrunkInfo.from_trunk(self.trunk))),
            "preprocessing": self.preprocessing.to_dict(),
            "tasks": {name: _listed(spec) for name, spec in specs.items()},
        }

    @classmethod
    def of(
        cls,
        engrams: Sequence[Engram],
        trunk: ViT | PathOrHubId | None = None,
        *,
        trunk_dtype: str = "fp32",
    ) -> Self:
        """The trunk that engrams name, or this one, with all of them attached, to be asked."""
        if not isinstance(trunk, ViT):
            trunk = load_trunk_of(engrams[0], trunk, trunk_dtype)
        model = cls(trunk)
        for engram in engrams:
            model.attach(engram)
        return model.eval()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: PathOrHubId,
        *,
        trunk: ViT | PathOrHubId | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        **others: Any,
    ) -> Self:
        """A model from a bundle: the trunk that it names, with all its tasks attached.

        The options have the names and the meaning that they have in huggingface_hub, and hold for
        a trunk on the Hub too. `engram.load_model` does the same from several sources.

        Args:
            pretrained_model_name_or_path: The folder of a bundle, the file of an engram, or a
                repository on the Hub: `owner/name`, or `hf:owner/name/FILE` for one engram of it.
            trunk: The trunk, or its path or Hub id, if it is not where the bundle says.
            revision: Branch, tag or commit of the repository on the Hub. The trunk has its own.
            token: Token for the Hub. By default the one of `hf auth login`; False sends none.
            cache_dir: Folder to keep downloads in, in place of the Hub's cache.
            local_files_only: Download nothing; what is not in the cache is an error.
            force_download: Download again what is in the cache.
            **others: Nothing: options of other libraries are refused with what to do instead.

        Returns:
            The model, in evaluation mode.

        Raises:
            EngramError: There is no such bundle, it is damaged, or the trunk is another one.

        Examples:
            >>> model.save_pretrained("meadow")
            >>> again = engram.MemoryViT.from_pretrained("meadow")
            >>> list(again.tasks)
            ['flowers']
        """
        _refuse("from_pretrained", others, _LOADING)
        source = _path_or_address(pretrained_model_name_or_path)
        _check_folder(Path(source))
        with hub.access(hub.Access(token, cache_dir, local_files_only, force_download)):
            return cls.of(read_engrams([local_path(source, revision)]), trunk)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_to_hub_kwargs: Any,
    ) -> str | None:
        """Write all tasks as a bundle. The trunk is not written; the bundle names it.

        Metrics and recipe that an engram had when it was attached, or that it was saved with, are
        kept as long as its weights are the same.

        Args:
            save_directory: The folder to write. A bundle that is there is replaced; any other
                folder that is not empty is refused.
            push_to_hub: Push it as well.
            repo_id: The repository to push to. By default the name of the folder.
            **push_to_hub_kwargs: Options of `push_to_hub`.

        Returns:
            The URL of the commit if it was pushed, and else None.

        Raises:
            EngramError: No task is attached, or the folder cannot be written.

        Examples:
            >>> model.save_pretrained("meadow")
        """
        if not push_to_hub:
            _refuse("save_pretrained", push_to_hub_kwargs, ("push_to_hub", "repo_id"))
        write_bundle(self._engrams(), save_directory)
        if not push_to_hub:
            return None
        return self.push_to_hub(repo_id or Path(save_directory).name, **push_to_hub_kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        trunk: str | None = None,
        replace: bool = False,
        **others: Any,
    ) -> str:
        """Send all tasks as a bundle to a repository on the Hub, with a card, in one commit.

        It is what `engram.push` sends: paths of this machine are shortened to their last part.

        Args:
            repo_id: The repository, `owner/name`, or a name in your own namespace. It is created if
                needed.
            commit_message: The commit message.
            private: Whether a repository that is created is private.
            token: Token for the Hub. By default the one of `hf auth login`.
            branch: The branch to commit to, by default `main`. It is created if needed.
            trunk: Hub id under which others find the trunk, if you have it as a local path.
            replace: Delete engrams in the repository that this model does not have. Without it, the
                push is refused if there are any.
            **others: Nothing: options of other libraries are refused with what to do instead.

        Returns:
            The URL of the commit.

        Raises:
            EngramError: No task is attached, or the Hub refused.

        Examples:
            >>> url = model.push_to_hub("you/meadow", private=True)  # doctest: +SKIP
        """
        _refuse("push_to_hub", others, _PUSHING)
        with tempfile.TemporaryDirectory() as folder, hub.access(hub.Access(token)):
            write_bundle(self._engrams(), Path(folder) / "bundle")
            sent = push(
                Path(folder) / "bundle", hub.own_repo(repo_id), revision=branch, private=private,
                backbone=trunk, message=commit_message, replace=replace,
            )  # fmt: skip
        return f"{sent.url}/commit/{sent.commit}"

    def _engrams(self) -> tuple[Engram, ...]:
        if not self.tasks:
            raise EngramError(
                "The model has no tasks, so there is nothing to save: a bundle holds engrams, and "
                "the trunk stays where it is. Add a task first; engram.save_trunk writes a trunk."
            )
        return in_order([(name, self.engram(name)) for name in self.tasks])


def _listed(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}


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
            f"engram.MemoryViT(engram.load_trunk({str(path)!r}))."
        )
    raise EngramError(
        f"{path} has no {MANIFEST}, so it is no bundle; save_pretrained and `engram compose` "
        "write one."
    )


def _refuse(method: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse options that this method does not have, by what to do in place of the first."""
    for name in given:
        instead = _INSTEAD.get(name, f"it takes {', '.join(known)}")
        raise EngramError(f"{method} does not take {name}: {instead}.")
