"""MemoryViT: a frozen backbone and the tasks attached to it, which answer in one pass.

Files, the Hub and cards are functions of `store/`, imported when they are called.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from engram.backbones.shape import BackboneShape
from engram.errors import EngramError, Notice
from engram.images.preprocessing import Preprocessing
from engram.methods import create_method
from engram.methods.attention_maps import AttentionMaps
from engram.methods.method import Cached
from engram.methods.method_flags import DEFAULT_REGIME
from engram.methods.routing import Entry, Route
from engram.model.passes import (
    HeadInputs,
    JoinCache,
    head_inputs,
    head_inputs_from_cache,
    task_inputs,
)
from engram.tasks.kind import IGNORED
from engram.tasks.spec import TaskSpec
from engram.tasks.task import BaseTask, Task, TaskRegistry, check_keys, module_name, task_name
from engram.vit import ViT

if TYPE_CHECKING:
    from engram.store.engram import Engram
    from engram.util.hub import PathOrHubId

Vectors = dict[str, Tensor]  # (images, numbers), by task


class MemoryViT(nn.Module):
    """A frozen backbone and the tasks attached to it, which share one forward pass.

    Args:
        backbone: The ViT. Its parameters are frozen.
        unmasked: Only for the experiment of the paper's section 4.4: tasks whose cells every token
            reads may then be attached together, and every token reads the cells of all of them.

    Attributes:
        backbone: The ViT.
        tasks: The attached tasks by name, parents before children.
        preprocessing: How images become pixels.
        config: What the model is, as JSON can hold it: its backbone and the spec of every task.

    Examples:
        >>> model = engram.MemoryViT(engram.load_backbone("pico"))
        >>> task = model.add_task("flowers", classes=["rose", "tulip"], cells=5)
        >>> logits = model(torch.rand(4, 3, 32, 32))  # {"base": (4, 10), "flowers": (4, 2)}
    """

    def __init__(self, backbone: ViT, *, unmasked: bool = False) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.registry = TaskRegistry(unmasked)
        self._base = (BaseTask(backbone),)  # in a tuple: it is no submodule, and has no parameters
        self.joined = JoinCache()
        #: Metrics, recipe and origin of tasks as they were attached or saved, with their content.
        self._records: dict[str, tuple[str, dict[str, Any]]] = {}

    def __repr__(self) -> str:
        height, width = self.backbone.config.image_size
        size = sum(parameter.numel() for parameter in self.backbone.parameters())
        tasks = [f"{name} ({task.spec.regime})" for name, task in self.registry.items()]
        return (
            f"MemoryViT({self.backbone.source!r}, {height} x {width} pixels, {size:,} parameters; "
            f"tasks: {', '.join(tasks) or 'none'})"
        )

    @property
    def preprocessing(self) -> Preprocessing:
        """The backbone's preprocessing, or plain pixels of its size if it has none."""
        size = self.backbone.config.image_size
        return self.backbone.preprocessing or Preprocessing(size=size, resize=None)

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The attached tasks by name, parents before children."""
        return self.registry

    def task(self, name: str) -> Task:
        """The attached task of this name.

        Args:
            name: The task's name; `base` is the backbone's own answer.

        Returns:
            The task: a module with its parameters, its `spec` and its `kind`.

        Examples:
            >>> model.task("flowers").spec.classes
            ('rose', 'tulip')
        """
        if name == self._base[0].spec.name:
            return self._base[0]
        if name not in self.registry:
            there = ", ".join(self.registry) or "none"
            raise EngramError(f"There is no task {name!r} in this model; attached: {there}.")
        return self.registry[name]

    def add_task(
        self,
        name: str,
        classes: int | Sequence[str],
        cells: int | None = None,
        *,
        regime: str = DEFAULT_REGIME,
        extends: Sequence[str] = (),
        class_init: str = "backbone",
        kind: str = "classification",
        values: Sequence[int] | None = None,
        ignore: int = IGNORED,
        seed: int | None = None,
        **settings: Any,
    ) -> Task:
        """Add a new, untrained task.

        Args:
            name: Its name: lower-case letters, digits, `.`, `_` and `-`, and not `base`.
            classes: The number of classes or their names. In regression, the numbers to predict.
            cells: Memory cells at every layer, in regimes that have some. 0 leaves a class token
                and a head.
            regime: The method: what trains, and how the task reads the backbone.
            extends: Names of attached tasks whose class tokens and cells this task reads.
            class_init: Where class tokens start: `backbone` (a copy of its own) or `random`.
            kind: What the task answers: `classification`, `multilabel`, `regression` or
                `segmentation`.
            values: In segmentation, the pixel value of each class in masks. By default 0, 1, ….
            ignore: In segmentation, the value of pixels that count nowhere.
            seed: Random seed for initialisation. Without one, torch's global generator is used.
            **settings: Other settings of the method, as `engram.methods` has them.

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
        if cells is not None:
            settings["cells"] = cells
        spec = TaskSpec.create(
            name, classes, create_method(regime, settings), extends=extends, kind=kind,
            values=values, ignore=ignore,
        )  # fmt: skip
        return self.add(spec, class_init=class_init, seed=seed)

    def add(self, spec: TaskSpec, *, class_init: str = "backbone", seed: int | None = None) -> Task:
        """Add an untrained task of this spec; `add_task` makes the spec for you."""
        self.check(spec)
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            return self._put(Task(spec, self.backbone, class_init))

    def check(self, spec: TaskSpec) -> None:
        """Refuse a task that could not be added: its settings, its name, its parents."""
        spec.fitted(BackboneShape.measure(self.backbone))
        self.registry.check(spec)

    def swap(self, spec: TaskSpec) -> Task:
        """Put an untrained task of another spec in the place of the one of this name."""
        self.task(spec.name)
        return self._put(Task(spec, self.backbone))

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
        self.registry.remove(name)
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
        from engram.store.format import write_engram

        engram = self.engram(name, metrics=metrics, recipe=recipe)
        written = write_engram(path, engram)
        self._records[name] = engram.content, engram.record()
        return written

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
            recipe: Training settings to record in the header. Without both, the header says what it
                said when these weights were attached or saved.

        Returns:
            The engram.

        Examples:
            >>> model.engram("flowers").spec.method.cells
            5
        """
        from engram.store.engram import new_engram

        task = self.task(name)
        parents = {parent: self.engram(parent).content for parent in task.spec.extends}
        engram = new_engram(
            task.spec,
            task.tensors(),
            backbone=self.backbone,
            parents=parents,
            metrics=metrics,
            recipe=recipe,
        )
        content, record = self._records.get(name, ("", {}))
        same = metrics is None and recipe is None and content == engram.content
        return replace(engram, **record) if same else engram

    def attach(self, source: str | Path | Engram) -> Task:
        """Attach an engram, after checking that it belongs to this backbone.

        Args:
            source: A path, an engram in memory, or one on the Hub (`hf:owner/name/FILE`, pinned by
                `@revision` or `#content`). A bundle or repository with a single engram is enough.

        Returns:
            The attached task.

        Raises:
            EngramError: The file is damaged, was trained on another backbone or with other
                preprocessing, its name is taken, or a task that it extends is not attached.

        Examples:
            >>> other = engram.MemoryViT(engram.load_backbone("pico"))
            >>> task = other.attach("flowers.safetensors")
        """
        from engram.store.engram import BackboneInfo, Engram
        from engram.store.format import read_engram
        from engram.store.remote import single_engram_path

        engram = source if isinstance(source, Engram) else read_engram(single_engram_path(source))
        own = BackboneInfo.from_backbone(self.backbone)
        engram.check_backbone(own, self.backbone.preprocessing)
        notice = engram.other_dtype(own)
        if notice is not None:
            warnings.warn(notice, Notice, stacklevel=2)
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
            task = Task(engram.spec, self.backbone)
        engram.fill(task)
        self._records[engram.spec.name] = engram.content, engram.record()
        return self._put(task)

    def _put(self, task: Task) -> Task:
        self.registry.put(task.to(self.backbone.device))
        self._refresh()
        return task.train(self.training)

    def _refresh(self) -> None:
        for name in [name for name in self._modules if task_name(name) is not None]:
            del self._modules[name]
        for name, task in self.registry.items():
            self.add_module(module_name(name), task)
        self.joined.clear(len(self.registry))

    # State dicts

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` gave. The keys name the tasks, so their order does not matter.

        Args:
            state_dict: Tensors by key: `backbone.…`, and `task:NAME.…` for every task.
            strict: Refuse a state dict that has not all tasks of this model, or others.
            assign: Use the tensors themselves in place of copies.

        Returns:
            torch's lists of the keys that were missing and of those that were not expected.

        Raises:
            EngramError: The tasks differ. Nothing is loaded then.

        Examples:
            >>> other = engram.load_model("flowers.safetensors")
            >>> keys = other.load_state_dict(model.state_dict())
        """
        if strict:
            check_keys(state_dict, self.registry)
        return super().load_state_dict(state_dict, strict, assign)

    # The forward pass

    def forward(
        self,
        pixels: Tensor,
        tasks: Sequence[str] | None = None,
        exact: bool = False,
        route: Sequence[Entry] | None = None,
    ) -> dict[str, Tensor]:
        """Answer all tasks, or some of them, or for each image its own, in one pass.

        A task whose regime changes the backbone's own tokens takes a pass of its own.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            tasks: The tasks to answer; `"base"` is the backbone's own head. Tasks that they extend
                are computed too. By default all tasks, and `"base"` if the backbone has a head.
            exact: Run the backbone alone and each task separately, so that every answer is bit for
                bit what it would be without the other tasks. Slower.
            route: What each image is asked for: a task, a list of tasks, or None for the backbone's
                own answer (`"base"`). Only that is computed, so a batch of images with a task each
                costs about as much as one task. `tasks` are then asked for every image besides; by
                default none.

        Returns:
            The outputs by task name: logits (images, classes), the numbers of a regression, or the
            logits (images, classes, height, width) of a segmentation. With `route`, a task has a
            row for each image that asked for it, in their order; `rows(route)` says which.

        Raises:
            EngramError: A task is not attached, the pixels have the wrong shape or type, or the
                route has not one entry for each image or a task that changes the backbone.

        Examples:
            >>> logits = model(torch.rand(4, 3, 32, 32), tasks=["flowers"])
            >>> logits["flowers"].shape
            torch.Size([4, 2])
            >>> logits = model(torch.rand(3, 3, 32, 32), route=["flowers", None, "flowers"])
            >>> logits["flowers"].shape, logits["base"].shape
            (torch.Size([2, 2]), torch.Size([1, 10]))
        """
        return self._inputs(self.output_names, pixels, tasks, exact, route).outputs()

    def rows(self, route: Sequence[Entry]) -> dict[str, list[int]]:
        """The images that ask for each task of a route: the rows of its answers.

        Args:
            route: What each image is asked for, as in a call of the model.

        Returns:
            The places of images in the batch, by task.

        Examples:
            >>> model.rows(["flowers", None, ("flowers", "base")])
            {'flowers': [0, 2], 'base': [1, 2]}
        """
        return Route(route).rows

    def embed(
        self,
        pixels: Tensor,
        tasks: Sequence[str] | None = None,
        exact: bool = False,
        route: Sequence[Entry] | None = None,
    ) -> Vectors:
        """One vector per image of the backbone and of every task: the input of its head.

        `"base"` is the backbone's pooled token after the final norm: its class token, or the mean
        of the patches where it has none. That of a task depends on its regime, as the guide to
        embeddings lists. A segmentation has the mean over patches, or over its own class tokens.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            tasks: The tasks to embed for; `"base"` is the backbone. By default `"base"` and all.
            exact: As in a call of the model: bit for bit what it would be without other tasks.
            route: As in a call of the model: what each image is asked for.

        Returns:
            The vectors (images, numbers) by name. Tasks may differ in how many numbers they have.
            With `route`, those of the images that asked.

        Examples:
            >>> vectors = model.embed(torch.rand(4, 3, 32, 32))
            >>> vectors["base"].shape, vectors["flowers"].shape
            (torch.Size([4, 192]), torch.Size([4, 192]))
        """
        return self._inputs(self.embedding_names, pixels, tasks, exact, route).vectors()

    def with_familiarity(
        self,
        pixels: Tensor,
        tasks: Sequence[str] | None = None,
        exact: bool = False,
        route: Sequence[Entry] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Answer tasks as a call of the model does, and say how familiar the images look to each.

        The arguments are those of a call of the model.

        Returns:
            The outputs by task name, and the familiarity (images) of the tasks that keep
            statistics of their training images: 1 is usual for validation images, and 5 % of them
            are below 0, less like what the task learned from.

        Examples:
            >>> pixels = torch.rand(4, 3, 32, 32)
            >>> outputs, familiarity = model.with_familiarity(pixels, tasks=["flowers"])
            >>> outputs["flowers"].shape
            torch.Size([4, 2])
        """
        inputs = self._inputs(self.output_names, pixels, tasks, exact, route)
        return inputs.outputs(), inputs.familiarity()

    def with_base(
        self, pixels: Tensor, tasks: Sequence[str], exact: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """`with_familiarity`, and the backbone's own vectors (images, width), in one pass."""
        base = self._base[0].spec.name
        found = head_inputs(self, list(dict.fromkeys([base, *tasks])), pixels, exact)
        own = HeadInputs(self, {name: found[name] for name in tasks})
        vectors = HeadInputs(self, {base: found[base]}).vectors()
        return own.outputs(), own.familiarity(), vectors[base]

    def attention(self, pixels: Tensor, task: str, method: str = "contribution") -> Tensor:
        """Maps of what a task reads of every patch, layer by layer.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            task: The task's name, or `"base"` for the backbone's own class token.
            method: `contribution`: how much a patch contributes to what the layer's attention
                adds to the task's class token, 0 where it works against the rest. `weights`: the
                softmax weights, averaged over heads. Some patches, often in the corners of every
                image, have high weights but contribute nearly nothing.

        Returns:
            One number for each patch, 0 or more: (images, layers, rows, columns). The sum over the
            last third of the layers makes the clearest picture. Where something else than a class
            token reads the patches, there is one map in place of layers.

        Raises:
            EngramError: The task is not attached or has no class token, or there is no such method.

        Examples:
            >>> maps = model.attention(torch.rand(4, 3, 32, 32), "flowers")
            >>> maps.shape, maps[:, -2:].sum(1).shape
            (torch.Size([4, 6, 8, 8]), torch.Size([4, 8, 8]))
        """
        if method not in ("contribution", "weights"):
            raise EngramError(f"There is no method {method!r}; choose contribution or weights.")
        maps: Tensor = getattr(self.attention_maps(task, pixels), method)
        return maps

    @torch.inference_mode()
    def attention_maps(self, name: str, pixels: Tensor) -> AttentionMaps:
        """Both maps of `attention`, and the share of the weights that each source has.

        An EngramError where the answer comes from no class token but from an average over patches.
        """
        task = self.task(name)
        backbone = task.backbone or self.backbone
        tasks = task_inputs(self, [name] if task.method.shares_pass else list(self.tasks))
        own = next(one for one in tasks if one.name == name)
        with backbone.autocast():
            return task.method.attention_maps(tasks, own, backbone, pixels)

    def output_names(self, tasks: Sequence[str] | None = None) -> list[str]:
        """Names that a call with these `tasks` answers: by default all, and "base" with a head."""
        base = self._base[0].spec.name
        if tasks is None:
            return ([base] if self.backbone.head is not None else []) + list(self.registry)
        if base in tasks and self.backbone.head is None:
            raise EngramError(
                f"The backbone {self.backbone.source} has no head of its own, so there is no "
                f"{base!r}."
            )
        return self.embedding_names(tasks)

    def embedding_names(self, tasks: Sequence[str] | None = None) -> list[str]:
        """Names that `embed` gives for these `tasks`; without, "base" and all."""
        if tasks is None:
            return [self._base[0].spec.name, *self.registry]
        if isinstance(tasks, str):
            raise EngramError(f"tasks is the text {tasks!r}; give a list such as [{tasks!r}].")
        names = list(dict.fromkeys(tasks))
        for name in names:
            self.task(name)
        return names

    def _inputs(
        self,
        known: Callable[[Sequence[str] | None], list[str]],
        pixels: Tensor,
        tasks: Sequence[str] | None,
        exact: bool,
        route: Sequence[Entry] | None,
    ) -> HeadInputs:
        """Head inputs by task.

        `exact` computes a route for all images: the last bits depend on how many share a product.
        """
        if route is None:
            return HeadInputs(self, head_inputs(self, known(tasks), pixels, exact))
        asked = Route(route, known(tasks or ()))
        names = known(list(asked.rows))
        for name in names:
            if not self.task(name).method.shares_pass:
                raise EngramError(
                    f"{name!r} has the regime {self.task(name).spec.regime!r}, which changes the "
                    "backbone's own tokens, so it cannot be in a route; ask for it without one."
                )
        if not exact:
            return HeadInputs(self, head_inputs(self, names, pixels, route=asked))
        asked.check(len(pixels))
        return HeadInputs(self, head_inputs(self, names, pixels, exact), asked.rows)

    def from_cache(
        self, cached: Cached, tasks: Sequence[str], size: tuple[int, int] | None = None
    ) -> HeadInputs:
        """Head inputs of tasks that leave the backbone unchanged, from features that are there.

        `size` is the (height, width) of the images, if not that of the preprocessing.
        """
        return HeadInputs(self, head_inputs_from_cache(self, tasks, cached, size))

    def constant(self, tasks: Sequence[str], size: tuple[int, int]) -> MemoryViT:
        """A copy in which all that depends on no image is computed, to be traced into a graph.

        It answers these tasks for images of this (height, width), and cannot be trained.
        """
        fixed = MemoryViT(self.backbone.at_size(size), unmasked=self.registry.unmasked)
        for task in self.registry.values():
            own = copy.deepcopy(task)
            own.backbone = None if own.backbone is None else own.backbone.at_size(size)
            fixed._put(own)
        fixed.to("cpu").eval().requires_grad_(False)
        fixed.joined.freeze()
        with torch.no_grad():
            for backbone in (fixed.backbone, *(task.backbone for task in fixed.tasks.values())):
                if backbone is not None:
                    backbone.keep_positions()
            fixed(torch.zeros(1, 3, *size, dtype=fixed.backbone.dtype), tasks)  # fills every cache
        return fixed

    # As models of huggingface_hub: the names and options mean what they mean in `ModelHubMixin`

    @property
    def config(self) -> dict[str, Any]:
        """The backbone, the preprocessing and the spec of every task, as JSON can hold it.

        Examples:
            >>> model.config["tasks"]["flowers"]["classes"]
            ['rose', 'tulip']
        """
        from engram.store.engram import BackboneInfo

        config = {
            "model_type": "engram",
            "backbone": asdict(BackboneInfo.from_backbone(self.backbone)),
            "preprocessing": self.preprocessing.to_dict(),
            "tasks": {name: task.spec.recorded() for name, task in self.tasks.items()},
        }
        plain: dict[str, Any] = json.loads(json.dumps(config))
        return plain

    @classmethod
    def from_engrams(
        cls,
        engrams: Sequence[Engram],
        backbone: ViT | PathOrHubId | None = None,
        *,
        backbone_dtype: str = "fp32",
    ) -> Self:
        """The backbone that engrams name, or this one, with all of them attached, to be asked."""
        from engram.store.engram import load_engram_backbone

        if not isinstance(backbone, ViT):
            backbone = load_engram_backbone(engrams[0], backbone, backbone_dtype)
        model = cls(backbone)
        for engram in engrams:
            model.attach(engram)
        return model.eval()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: PathOrHubId,
        *,
        backbone: ViT | PathOrHubId | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        **others: Any,
    ) -> Self:
        """A model from a bundle: the backbone that it names, with all its tasks attached.

        The options have the names and the meaning that they have in huggingface_hub, and hold for
        a backbone on the Hub too. `engram.load_model` does the same from several sources.

        Args:
            pretrained_model_name_or_path: The folder of a bundle, the file of an engram, or a
                repository on the Hub: `owner/name`, or `hf:owner/name/FILE` for one engram of it.
            backbone: The backbone, or its path or Hub id, if it is not where the bundle says.
            revision: Branch, tag or commit of the repository on the Hub. The backbone has its own.
            token: Token for the Hub. By default the one of `hf auth login`; False sends none.
            cache_dir: Folder to keep downloads in, in place of the Hub's cache.
            local_files_only: Download nothing; what is not in the cache is an error.
            force_download: Download again what is in the cache.
            **others: Nothing: options of other libraries are refused with what to do instead.

        Returns:
            The model, in evaluation mode.

        Raises:
            EngramError: There is no such bundle, it is damaged, or the backbone is another one.

        Examples:
            >>> model.save_pretrained("meadow")
            >>> again = engram.MemoryViT.from_pretrained("meadow")
            >>> list(again.tasks)
            ['flowers']
        """
        from engram.store import sharing
        from engram.util import hub

        sharing.refuse_options("from_pretrained", others, sharing.LOADING)
        with hub.access(hub.Access(token, cache_dir, local_files_only, force_download)):
            engrams = sharing.read_pretrained(pretrained_model_name_or_path, revision)
            return cls.from_engrams(engrams, backbone)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_to_hub_kwargs: Any,
    ) -> str | None:
        """Write all tasks as a bundle. The backbone is not written; the bundle names it.

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

        Examples:
            >>> model.save_pretrained("meadow")
        """
        from engram.store import sharing
        from engram.store.compose import write_bundle

        if not push_to_hub:
            sharing.refuse_options(
                "save_pretrained", push_to_hub_kwargs, ("push_to_hub", "repo_id")
            )
        write_bundle(self._engrams(), save_directory, overwrite=True)
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
        backbone: str | None = None,
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
            backbone: Hub id under which others find the backbone, if you have it as a local path.
            replace: Delete engrams in the repository that this model does not have. Without it, the
                push is refused if there are any.
            **others: Nothing: options of other libraries are refused with what to do instead.

        Returns:
            The URL of the commit.

        Examples:
            >>> url = model.push_to_hub("you/meadow", private=True)  # doctest: +SKIP
        """
        from engram.store import sharing

        sharing.refuse_options("push_to_hub", others, sharing.PUSHING)
        return sharing.push_bundle(
            self._engrams(), repo_id, token=token, revision=branch, private=private,
            backbone=backbone, message=commit_message, replace=replace,
        )  # fmt: skip

    def _engrams(self) -> tuple[Engram, ...]:
        if not self.tasks:
            raise EngramError(
                "The model has no tasks, so there is nothing to save: a bundle holds engrams, and "
                "the backbone stays where it is. Add a task first; engram.save_backbone writes a "
                "backbone."
            )
        from engram.store.engram import in_order

        return in_order([(name, self.engram(name)) for name in self.tasks])
