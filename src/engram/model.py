"""MemoryViT: a trunk and the engrams attached to it.

Long because the reference is generated from the docstrings of its public methods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engram.adapters import Bank
from engram.attention import attention
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.memory import (
    Memory,
    Stream,
    TrunkPass,
    WatchFirst,
    forward_fast,
    forward_tasks,
    from_normed,
    full_attention,
    reads_lean,
)
from engram.readout import Moments, Readers
from engram.side import Member, Sides
from engram.store.engram import Engram, TrunkInfo, new_engram
from engram.store.format import read_engram, write_engram
from engram.store.remote import single_engram_path
from engram.tasks.heads import Patches
from engram.tasks.keys import check_tasks, module_name, name_tasks, task_name
from engram.tasks.kinds import IGNORED
from engram.tasks.registry import TaskRegistry
from engram.tasks.settings import TaskSettings
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task
from engram.util.devices import autocast_dtype
from engram.util.tensors import version
from engram.vit import ViT

_Made = TypeVar("_Made", Memory, Sides)
_KEPT = 8  # selections of tasks whose cells' keys and values are kept


@dataclass(frozen=True)
class _Seen:
    """What the head of a task is given of images."""

    own: Tensor  # the task's own tokens (b, k, D), or one vector (b, features)
    patches: Patches | None


@dataclass(frozen=True)
class _Base:
    """What the trunk's own head is given: its last tokens (b, n, D) before and after the norm."""

    raw: Tensor
    tokens: Tensor


class MemoryViT(nn.Module):
    """A frozen trunk and the tasks attached to it, which share one forward pass.

    Args:
        trunk: The ViT. Its parameters are frozen.
        unmasked: Only for the experiment of the paper's section 4.4: tasks of the regime `memory`
            may then be attached side by side, and every token reads the cells of all of them.

    Attributes:
        trunk: The ViT.
        tasks: The attached tasks by name, parents before children.
        preprocessing: How images become pixels.

    Examples:
        >>> model = engram.MemoryViT(engram.load_trunk("pico"))
        >>> task = model.add_task("flowers", classes=["rose", "tulip"], cells=5)
        >>> logits = model(torch.rand(4, 3, 32, 32))  # {"base": (4, 10), "flowers": (4, 2)}
    """

    def __init__(self, trunk: ViT, *, unmasked: bool = False) -> None:
        super().__init__()
        self.trunk = trunk.requires_grad_(False)
        self._tasks = TaskRegistry(unmasked)
        self._memories: dict[tuple[str, ...], tuple[object, Any]] = {}  # streams, and sides
        self._constant: Memory | None = None
        self._constant_sides: Sides | None = None

    def __repr__(self) -> str:
        height, width = self.trunk.config.image_size
        size = sum(parameter.numel() for parameter in self.trunk.parameters())
        tasks = [f"{name} ({task.spec.regime})" for name, task in self._tasks.items()]
        return (
            f"MemoryViT({self.trunk.source!r}, {height} x {width} pixels, {size:,} parameters; "
            f"tasks: {', '.join(tasks) or 'none'})"
        )

    @property
    def preprocessing(self) -> Preprocessing:
        """How pictures become pixels: the trunk's way, or plain ones of its size if it has none."""
        size = self.trunk.config.image_size
        return self.trunk.preprocessing or Preprocessing(size=size, resize=None)

    # Tasks

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The attached tasks by name, parents before children."""
        return self._tasks

    def task(self, name: str) -> Task:
        """The attached task of this name.

        Args:
            name: The task's name.

        Returns:
            The task: a module with its parameters, its `spec` and its `kind`.

        Raises:
            EngramError: No task of this name is attached.

        Examples:
            >>> model.task("flowers").spec.classes
            ('rose', 'tulip')
        """
        if name not in self._tasks:
            there = ", ".join(self._tasks) or "none"
            raise EngramError(f"There is no task {name!r} in this model; attached: {there}.")
        return self._tasks[name]

    def add_task(
        self,
        name: str,
        classes: int | Sequence[str],
        cells: int = 5,
        *,
        regime: str = "masked",
        extends: Sequence[str] = (),
        update: str = "fresh",
        tokens: int | None = None,
        adapter_width: int = 32,
        rank: int = 16,
        class_init: str = "trunk",
        kind: str = "classification",
        values: Sequence[int] | None = None,
        ignore: int = IGNORED,
        seed: int | None = None,
    ) -> Task:
        """Add a new, untrained task.

        Args:
            name: Its name: lower-case letters, digits, `.`, `_` and `-`, and not `base`.
            classes: The number of classes or their names. In regression, the numbers to predict.
            cells: Memory cells at every layer. 0 leaves a class token and a head.
            regime: Which parameters train, and whether attention is masked.
            extends: Names of attached tasks whose class tokens and cells this task reads.
            update: How the regime `memory` passes cells from layer to layer: `fresh`, `propagate`
                or `add`.
            tokens: Number of class tokens. By default 1, or one for each class in masked
                segmentation.
            adapter_width: Width of the bottleneck, in regimes with adapters.
            rank: Width of the side patches, in the regimes `side` and `side+readout`.
            class_init: Where the class token starts: `trunk` (a copy of the trunk's) or `random`.
            kind: What the task answers: `classification`, `multilabel`, `regression` or
                `segmentation`.
            values: In segmentation, the pixel value of each class in masks. By default 0, 1, ….
            ignore: In segmentation, the value of pixels that count nowhere.
            seed: Random seed for initialisation. Without one, torch's global generator is used.

        Returns:
            The task, attached.

        Raises:
            EngramError: A setting is wrong, the name is taken, or the task cannot share a pass with
                those attached.

        Examples:
            >>> task = model.add_task("roses", classes=3, cells=5, extends=["flowers"])
            >>> list(model.tasks)
            ['flowers', 'roses']
        """
        if isinstance(extends, str):
            raise EngramError(
                f"extends is the text {extends!r}; give a list such as [{extends!r}]."
            )
        settings = TaskSettings(
            regime, cells, tuple(extends), update, adapter_width, class_init, rank
        )
        spec = TaskSpec.create(
            name, classes, settings, kind=kind, tokens=tokens, values=values, ignore=ignore
        )
        return self.add(spec, class_init=class_init, seed=seed)

    def add(self, spec: TaskSpec, *, class_init: str = "trunk", seed: int | None = None) -> Task:
        """Add an untrained task of this spec; `add_task` makes the spec for you."""
        self.check(spec)
        if seed is None:
            return self._put(Task(spec, self.trunk, class_init))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._put(Task(spec, self.trunk, class_init))

    def check(self, spec: TaskSpec) -> None:
        """Refuse a task that could not be added: its name, its parents or its regime."""
        self._tasks.check(spec)

    def swap(self, spec: TaskSpec) -> Task:
        """Put an untrained task of another spec in the place of the one of this name."""
        self.task(spec.name)
        return self._put(Task(spec, self.trunk))

    def detach(self, name: str) -> None:
        """Remove a task. The answers of all others stay the same.

        Args:
            name: The task's name.

        Raises:
            EngramError: No task of this name is attached, or others extend it.

        Examples:
            >>> task = model.add_task("roses", classes=3, extends=["flowers"])
            >>> model.detach("roses")  # flowers can be detached only after it
        """
        self.task(name)
        self._tasks.remove(name)
        self._refresh()

    def save(
        self,
        name: str,
        path: str | Path,
        *,
        metrics: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write one task as an engram. The file appears whole or not at all.

        Args:
            name: The task's name.
            path: The file to write, usually `NAME.safetensors`. An existing file is replaced.
            metrics: Results to record in the file's header.
            recipe: Training settings to record in the file's header.

        Returns:
            The path.

        Raises:
            EngramError: No task of this name is attached, a value is not finite, or the file cannot
                be written.

        Examples:
            >>> model.save("flowers", "flowers.safetensors")
            PosixPath('flowers.safetensors')
        """
        return write_engram(path, self.engram(name, metrics=metrics, recipe=recipe))

    def engram(
        self,
        name: str,
        *,
        metrics: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> Engram:
        """One task as an engram in memory: what `save` would write.

        Args:
            name: The task's name.
            metrics: Results to record in the header.
            recipe: Training settings to record in the header.

        Returns:
            The engram.

        Examples:
            >>> model.engram("flowers").spec.cells
            5
        """
        task = self.task(name)
        parents = {parent: self.engram(parent).content for parent in task.spec.extends}
        return new_engram(
            task.spec,
            task.tensors(),
            trunk=self.trunk,
            parents=parents,
            metrics=metrics,
            recipe=recipe,
        )

    def attach(self, source: str | Path | Engram) -> Task:
        """Attach an engram, after checking that it belongs to this trunk.

        Args:
            source: A path, an engram in memory, or one on the Hub (`hf:owner/name/FILE`, pinned by
                `@revision` or `#content`). A bundle or repository with a single engram is enough.

        Returns:
            The attached task.

        Raises:
            EngramError: The file is damaged, was trained on another trunk or with other
                preprocessing, its name is taken, or a task that it extends is not attached.

        Examples:
            >>> other = engram.MemoryViT(engram.load_trunk("pico"))
            >>> task = other.attach("flowers.safetensors")
        """
        if not isinstance(source, Engram):
            source = read_engram(single_engram_path(source))
        engram = source
        engram.check_trunk(TrunkInfo.from_trunk(self.trunk), self.trunk.preprocessing)
        self.check(engram.spec)
        for parent, content in engram.parents.items():
            attached = self.engram(parent).content
            if attached != content:
                raise EngramError(
                    f"The engram {engram.spec.name!r} extends a {parent!r} with the content "
                    f"{content[:12]}, but the attached {parent!r} has {attached[:12]}; attach the "
                    "one it was trained with."
                )
        with torch.random.fork_rng(devices=[]):  # the draws are overwritten
            task = Task(engram.spec, self.trunk)
        engram.fill(task)
        return self._put(task)

    def _put(self, task: Task) -> Task:
        self._tasks.put(task.to(self.trunk.position.device))
        self._refresh()
        return task.train(self.training)

    def _refresh(self) -> None:
        for name in [name for name in self._modules if task_name(name) is not None]:
            del self._modules[name]
        for name, task in self._tasks.items():
            self.add_module(module_name(name), task)
        self._memories.clear()

    # State dicts

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` gave. The keys name the tasks, so their order does not matter.

        Args:
            state_dict: Tensors by key: `trunk.…`, and `task:NAME.…` for every task.
            strict: Refuse a state dict that has not all tasks of this model, or others.
            assign: Use the tensors themselves in place of copies.

        Returns:
            torch's lists of the keys that were missing and of those that were not expected.

        Raises:
            EngramError: The tasks differ, or the state dict is of an earlier version, whose keys
                number the tasks, and it has several. Nothing is loaded then.

        Examples:
            >>> other = engram.load_model("flowers.safetensors")
            >>> keys = other.load_state_dict(model.state_dict())
        """
        if strict:
            check_tasks(state_dict, self._tasks)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        name_tasks(state_dict, prefix, list(self._tasks))  # also inside of another module
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    # The forward pass

    def forward(
        self, pixels: Tensor, tasks: Sequence[str] | None = None, exact: bool = False
    ) -> dict[str, Tensor]:
        """Answer all tasks, or some of them, in one pass.

        A task whose regime changes the trunk's own tokens takes a pass of its own.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            tasks: The tasks to answer; `"base"` is the trunk's own head. Tasks that they extend are
                computed too. By default all tasks, and `"base"` if the trunk has a head.
            exact: Run the trunk alone and each task separately, so that every answer is bit for bit
                what it would be without the other tasks. Slower.

        Returns:
            The outputs by task name: logits (images, classes), the numbers of a regression, or the
            logits (images, classes, height, width) of a segmentation.

        Raises:
            EngramError: A task is not attached, or the pixels have the wrong shape or type.

        Examples:
            >>> logits = model(torch.rand(4, 3, 32, 32), tasks=["flowers"])
            >>> logits["flowers"].shape
            torch.Size([4, 2])
        """
        seen = self._seen(self.output_names(tasks), pixels, exact)
        return {name: self._head(name, sight) for name, sight in seen.items()}

    def embed(
        self, pixels: Tensor, tasks: Sequence[str] | None = None, exact: bool = False
    ) -> dict[str, Tensor]:
        """One vector per image of the trunk and of every task: what a head is given of the image.

        `"base"` is the trunk's pooled token after the final norm: its class token, or the mean of
        the patches where it has none. What a task adds depends on its regime:

        - `head`, `mlp-head`: the trunk's pooled token, the same as `"base"`.
        - `masked`, `masked+adapter`: the task's own class token (the mean, if it has several).
        - `readout`: the moments of all layers that its head reads.
        - `side`, `side+readout`: the pooled token or the moments, then the pooled side patches.
        - all others: the pooled token of the pass that the task changed.

        A segmentation has the mean over patches of what its head is given of each patch, or its
        own class tokens' mean where it has some.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            tasks: The tasks to embed for; `"base"` is the trunk. By default `"base"` and all.
            exact: As in a call of the model: bit for bit what it would be without other tasks.

        Returns:
            The vectors (images, numbers) by name. Tasks may differ in how many numbers they have.

        Raises:
            EngramError: A task is not attached, or the pixels have the wrong shape or type.

        Examples:
            >>> vectors = model.embed(torch.rand(4, 3, 32, 32))
            >>> vectors["base"].shape, vectors["flowers"].shape
            (torch.Size([4, 192]), torch.Size([4, 192]))
        """
        seen = self._seen(self.embedding_names(tasks), pixels, exact)
        return {
            name: self.trunk.pool(sight.tokens)
            if isinstance(sight, _Base)
            else self.task(name).head.embed(sight.own, sight.patches)
            for name, sight in seen.items()
        }

    def attention(self, pixels: Tensor, task: str, method: str = "contribution") -> Tensor:
        """What a task reads of every patch of images, layer by layer.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            task: The task's name, or `"base"` for the trunk's own class token.
            method: `contribution`: how much a patch contributes to what the layer's attention
                adds to the task's class token, 0 where it works against the rest. `weights`: the
                softmax weights, averaged over heads. Some patches, often in the corners of every
                image, have high weights but contribute nearly nothing.

        Returns:
            One number for each patch, 0 or more: (images, layers, rows, columns). The sum over the
            last third of the layers makes the clearest picture. A task with side patches has one
            map in place of layers: how it pools them after the last layer.

        Raises:
            EngramError: The task is not attached or has no class token, or there is no such method.

        Examples:
            >>> maps = model.attention(torch.rand(4, 3, 32, 32), "flowers")
            >>> maps.shape, maps[:, -2:].sum(1).shape
            (torch.Size([4, 6, 8, 8]), torch.Size([4, 8, 8]))
        """
        if method not in ("contribution", "weights"):
            raise EngramError(f"There is no method {method!r}; choose contribution or weights.")
        found = attention(self, task, pixels)
        return found.contribution if method == "contribution" else found.weights

    def _seen(self, names: Sequence[str], pixels: Tensor, exact: bool) -> dict[str, _Seen | _Base]:
        """What the head of each of these tasks, and of "base", is given of the images."""
        alone = [n for n in names if n != "base" and self.task(n).spec.parts.changes_trunk]
        seen: dict[str, _Seen | _Base] = {name: self._seen_alone(name, pixels) for name in alone}
        shared = [name for name in names if name not in seen]
        if shared:
            size = (pixels.shape[-2], pixels.shape[-1])
            seen.update(self._seen_together(shared, self.trunk.embed(pixels), size, exact))
        return {name: seen[name] for name in names}

    def _head(self, name: str, seen: _Seen | _Base) -> Tensor:
        """The output of "base" or of a task."""
        if isinstance(seen, _Base):
            assert self.trunk.head is not None
            output: Tensor = self.trunk.head(seen.raw, seen.tokens)
            return output
        return self.task(name).head.read(seen.own, seen.patches)

    def from_cache(
        self,
        layers: Sequence[Tensor],
        pooled: Tensor,
        tasks: Sequence[str],
        final: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> dict[str, Tensor]:
        """Logits of tasks that leave the trunk alone, from what `cache.Cache` kept of it.

        `layers` are the trunk's normed tokens (b, n, D) of every layer, `pooled` (b, D) its last.
        Tasks that read all of the last tokens need the `final` normed ones (b, n, D), too, and
        those that answer for every pixel the (height, width) of the images.
        """
        masked = [name for name in tasks if self.task(name).spec.parts.masked]
        streams: dict[str, Tensor] = {}
        if masked:
            memory = self._memory(masked, pooled)
            streams = memory.split(self.trunk.norm(from_normed(self.trunk, layers, memory)))
        readers = self._readers(tasks, pooled)
        if readers:
            assert final is not None
            for step, tokens in enumerate([*layers, final]):
                readers.see(step, tokens)
        patches = None
        if final is not None and size is not None:
            patches = self._patches(self.trunk, final, size)
        sights = {n: self._sight(n, streams.get(n), pooled, patches, readers) for n in tasks}
        return {name: self._head(name, sight) for name, sight in sights.items()}

    def _sight(
        self,
        name: str,
        stream: Tensor | None,
        pooled: Tensor,
        patches: Patches | None,
        readers: Readers,
    ) -> _Seen:
        """What the head of a task that leaves the trunk alone is given."""
        task = self.task(name)
        spec = task.spec
        if stream is not None:
            return _Seen(stream, patches)
        if patches is not None and task.kind.per_pixel:
            tokens = readers.patches(name, patches.tokens)
            return _Seen(pooled, replace(patches, tokens=tokens))
        layers = spec.layers if spec.parts.moments else 0
        return _Seen(readers.features(name, layers, pooled), patches)

    def _readers(self, names: Sequence[str], x: Tensor, exact: bool = False) -> Readers:
        """What reads the trunk's normed tokens for these tasks; with `exact`, each by itself."""
        parts = {name: self.task(name).spec.parts for name in names if name != "base"}
        side = [name for name, has in parts.items() if has.side]
        groups = [[name] for name in side] if exact else [side] if side else []
        climbs = [self._sides(group, x).begin() for group in groups]
        moments = any(has.moments for has in parts.values())
        return Readers(climbs, Moments(self.trunk) if moments else None)

    def from_moments(self, moments: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Logits of readouts and heads, from the moments (b, features) of every layer."""
        heads = {name: self.task(name).head for name in tasks}
        return {n: head.read(moments[:, : head.in_features], None) for n, head in heads.items()}

    def moments(self, pixels: Tensor) -> Tensor:
        """What a `readout` of all layers sees of these images: (b, features)."""
        moments = Moments(self.trunk)
        raw = self.trunk.encode(self.trunk.embed(pixels), moments.see)
        moments.see(self.trunk.config.depth, self.trunk.norm(raw))
        return moments.last(len(moments.layers))

    def sides(self, names: Sequence[str]) -> Sides:
        """The side patches of these tasks and of all they extend, parents first."""
        members = []
        for name in self._tasks.closure(names):
            task = self.task(name)
            assert task.side is not None
            assert task.cells is not None
            members.append(Member(name, task.side, task.cells, task.spec.extends))
        return Sides(members)

    def memory(self, names: Sequence[str]) -> Memory:
        """The streams of these masked tasks and of all they read, parents first."""
        closure = self._tasks.closure(names)
        streams = []
        for name in closure:
            task = self.task(name)
            assert task.class_token is not None
            assert task.cells is not None
            ancestors = self._tasks.closure(task.spec.extends)
            streams.append(
                Stream(
                    name=name,
                    token=task.class_token,
                    cells=task.cells,
                    extends=tuple(closure.index(ancestor) for ancestor in ancestors),
                    after_norm=task.spec.after_norm,
                    adapters=task.adapters,
                )
            )
        return Memory(self.trunk, streams)

    def constant(self, tasks: Sequence[str], size: tuple[int, int]) -> MemoryViT:
        """A copy in which all that depends on no image is computed, to be traced into a graph.

        It answers these tasks for images of this (height, width), and cannot be trained.
        """
        fixed = MemoryViT(self.trunk.at_size(size), unmasked=self._tasks.unmasked)
        for task in self._tasks.values():
            own = copy.deepcopy(task)
            own.trunk = None if own.trunk is None else own.trunk.at_size(size)
            fixed._put(own)
        fixed.to("cpu").eval().requires_grad_(False)
        masked = [n for n in tasks if n != "base" and fixed.task(n).spec.parts.masked]
        side = [n for n in tasks if n != "base" and fixed.task(n).spec.parts.side]
        with torch.no_grad():
            if masked:
                fixed._constant = fixed.memory(masked)
                for layer, block in enumerate(fixed.trunk.layers):
                    fixed._constant.keys_values(layer, block)
            if side:
                fixed._constant_sides = fixed.sides(side)
        return fixed

    def output_names(self, tasks: Sequence[str] | None = None) -> list[str]:
        """What a call with these `tasks` answers; without, "base" (if it has a head) and all."""
        if tasks is None:
            return (["base"] if self.trunk.head is not None else []) + list(self._tasks)
        if "base" in tasks and self.trunk.head is None:
            raise EngramError(
                f"The trunk {self.trunk.source} has no head of its own, so there is no 'base'."
            )
        return self.embedding_names(tasks)

    def embedding_names(self, tasks: Sequence[str] | None = None) -> list[str]:
        """What `embed` gives for these `tasks`; without, "base" and all."""
        if tasks is None:
            return ["base", *self._tasks]
        if isinstance(tasks, str):
            raise EngramError(f"tasks is the text {tasks!r}; give a list such as [{tasks!r}].")
        names = list(dict.fromkeys(tasks))
        for name in names:
            if name != "base":
                self.task(name)
        return names

    def _seen_together(
        self, names: Sequence[str], x: Tensor, size: tuple[int, int], exact: bool
    ) -> dict[str, _Seen | _Base]:
        """Base, heads and masked tasks, all from the trunk's embedded tokens x (b, n, D)."""
        masked = [n for n in names if n != "base" and self.task(n).spec.parts.masked]
        others = [n for n in names if n not in masked]
        per_pixel = any(self.task(n).kind.per_pixel for n in names if n != "base")
        readers = self._readers(names, x, exact)
        see = readers.see if readers else None
        whole = exact or per_pixel or see is not None
        keep = x.shape[1] if whole else self._trunk_tokens_needed(others, x.shape[1])
        streams: dict[str, Tensor] = {}  # (b, k, D)
        if not masked:
            raw = self.trunk.encode(x, see)
        elif exact or self._builds_graph(masked, x):
            groups = [[name] for name in masked] if exact else [masked]
            memories = [self._memory(group, x) for group in groups]
            lean = not exact and reads_lean(self.trunk, x.shape[1], memories[0])
            trunk = TrunkPass(self.trunk, x, keep, lean, see)
            views = list(trunk) if len(groups) > 1 else trunk
            for group, memory in zip(groups, memories, strict=True):
                computed = memory.split(forward_tasks(self.trunk, views, memory, len(x)))
                streams.update({name: computed[name] for name in group})
            raw = trunk.tokens
        else:
            memory = self._memory(masked, x)
            raw, y = forward_fast(self.trunk, x, memory, keep, see=see)
            streams = memory.split(y)
        tokens = self.trunk.norm(raw) if others or per_pixel else raw
        if readers:
            readers.see(self.trunk.config.depth, tokens)
        patches = self._patches(self.trunk, tokens, size) if per_pixel else None
        pooled = self.trunk.pool(tokens) if set(others) - {"base"} else raw
        seen: dict[str, _Seen | _Base] = {}
        for name in names:
            if name == "base":
                seen[name] = _Base(raw, tokens)
            else:
                stream = self.trunk.norm(streams[name]) if name in streams else None
                seen[name] = self._sight(name, stream, pooled, patches, readers)
        return seen

    def _patches(self, trunk: ViT, tokens: Tensor, size: tuple[int, int]) -> Patches:
        """The patches among the last tokens (b, n, D), which come behind all others."""
        rows, columns = (side // trunk.config.patch for side in size)
        return Patches(tokens[:, tokens.shape[1] - rows * columns :], (rows, columns), size)

    def _seen_alone(self, name: str, pixels: Tensor) -> _Seen:
        """A task that changes the trunk's own tokens."""
        task = self.task(name)
        trunk = self.trunk if task.trunk is None else task.trunk
        tokens = trunk.norm(self.tokens_alone(task, pixels))
        pooled = tokens[:, 0] if task.class_token is not None else trunk.pool(tokens)
        size = (pixels.shape[-2], pixels.shape[-1])
        patches = self._patches(trunk, tokens, size) if task.kind.per_pixel else None
        return _Seen(pooled, patches)

    def tokens_alone(
        self, task: Task | None, pixels: Tensor, watch: WatchFirst | None = None
    ) -> Tensor:
        """The last layer's tokens where all tokens read each other: of such a task, or of none.

        `watch` is called as by `full_attention`.
        """
        config = self.trunk.config
        cells = self.trunk.position.new_empty(config.depth, 0, config.width)
        if task is None:
            return full_attention(self.trunk, self.trunk.embed(pixels), cells, watch=watch)
        trunk = self.trunk if task.trunk is None else task.trunk
        x = trunk.embed(pixels, task.class_token)
        bank = Bank([(range(1), task.adapters)], 1) if task.adapters is not None else None
        if task.cells is not None:
            others = [t.cells for t in self._tasks.values() if t is not task]
            cells = torch.cat([task.cells, *(o for o in others if o is not None)], 1)
        return full_attention(trunk, x, cells, task.spec.update, bank, watch)

    def _trunk_tokens_needed(self, names: Sequence[str], n: int) -> int:
        """How many of the trunk's last tokens the answers of base and heads are made from."""
        needed = 0
        for name in names:
            head, prefix = self.trunk.config.head, self.trunk.config.prefix
            if not self.trunk.config.class_token:
                needed = n
            elif name != "base" or head is None:
                needed = max(needed, 1)
            else:
                needed = max(needed, prefix if head.pooling in ("class", "distilled") else n)
        return needed

    def _builds_graph(self, names: Sequence[str], x: Tensor) -> bool:
        if not torch.is_grad_enabled():
            return False
        tasks = (self.task(name) for name in self._tasks.closure(names))
        return x.requires_grad or any(p.requires_grad for task in tasks for p in task.parameters())

    def _memory(self, names: Sequence[str], x: Tensor) -> Memory:
        """The streams of these tasks and of what they read, ready to read the trunk."""
        return self._constant or self._kept_while_same(self.memory, names, x)

    def _sides(self, names: Sequence[str], x: Tensor) -> Sides:
        """The side patches of these tasks and of what they extend, ready to climb."""
        return self._constant_sides or self._kept_while_same(self.sides, names, x)

    def _kept_while_same(
        self, make: Callable[[Sequence[str]], _Made], names: Sequence[str], x: Tensor
    ) -> _Made:
        """What `make` makes of these tasks; outside of training it is kept until they change.

        torch.compile cannot ask whether they changed: a compiled pass makes it every time.
        """
        if torch.compiler.is_compiling():
            return make(names)
        if self._builds_graph(names, x):
            self._memories.clear()  # some optimisers write where `version` does not see it
            return make(names)
        closure = self._tasks.closure(names)
        key, state = tuple(closure), self._versions(closure)
        kept = self._memories.pop(key, None)
        if kept is None or kept[0] != state:
            kept = (state, make(names))
        self._memories[key] = kept  # the newest is last
        while len(self._memories) > _KEPT + len(self._tasks):  # `exact` has one for each task
            del self._memories[next(iter(self._memories))]
        made: _Made = kept[1]
        return made

    def _versions(self, closure: Sequence[str]) -> object:
        """Changes with all that a `Memory` of these tasks is made from."""
        parameters = [
            p for b in self.trunk.layers for m in (b.norm1, b.qkv) for p in m.parameters()
        ]
        parameters += [p for p in (self.trunk.prefix_position,) if p is not None]
        if self.trunk.pre_norm is not None:
            parameters += self.trunk.pre_norm.parameters()
        for name in closure:
            parameters += self.task(name).parameters()
        cast = autocast_dtype(self.trunk.position.device)
        return cast, tuple(map(version, parameters))
