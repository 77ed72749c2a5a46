"""MemoryViT: a trunk and the engrams attached to it, which answer in one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engram.attention import attention
from engram.errors import EngramError
from engram.memory import Memory
from engram.passes import CachedLayers
from engram.prepared import memory_of, sides_of
from engram.pretrained import Pretrained
from engram.readout import Moments
from engram.routing import Entry, Route
from engram.side import Sides
from engram.sights import (
    BaseSight,
    Pass,
    Sight,
    check_regimes,
    routed_sights,
    sights,
    sights_from_cache,
    sights_from_pass,
)
from engram.squares import squares_of

Vectors = dict[str, Tensor]  # (images, numbers), by task


class MemoryViT(Pretrained):
    """A frozen trunk and the tasks attached to it, which share one forward pass.

    Args:
        trunk: The ViT. Its parameters are frozen.
        unmasked: Only for the experiment of the paper's section 4.4: tasks of the regime `memory`
            may then be attached side by side, and every token reads the cells of all of them.

    Attributes:
        trunk: The ViT.
        tasks: The attached tasks by name, parents before children.
        preprocessing: How images become pixels.
        config: What the model is, as JSON can hold it: its trunk and the spec of every task.

    Examples:
        >>> model = engram.MemoryViT(engram.load_trunk("pico"))
        >>> task = model.add_task("flowers", classes=["rose", "tulip"], cells=5)
        >>> logits = model(torch.rand(4, 3, 32, 32))  # {"base": (4, 10), "flowers": (4, 2)}
    """

    def forward(
        self,
        pixels: Tensor,
        tasks: Sequence[str] | None = None,
        exact: bool = False,
        route: Sequence[Entry] | None = None,
    ) -> dict[str, Tensor]:
        """Answer all tasks, or some of them, or for each image its own, in one pass.

        A task whose regime changes the trunk's own tokens takes a pass of its own.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            tasks: The tasks to answer; `"base"` is the trunk's own head. Tasks that they extend are
                computed too. By default all tasks, and `"base"` if the trunk has a head.
            exact: Run the trunk alone and each task separately, so that every answer is bit for bit
                what it would be without the other tasks. Slower.
            route: What each image is asked for: a task, a list of tasks, or None for the trunk's
                own answer (`"base"`). Only that is computed, so a batch of images with a task each
                costs about as much as one task. `tasks` are then asked for every image besides; by
                default none.

        Returns:
            The outputs by task name: logits (images, classes), the numbers of a regression, or the
            logits (images, classes, height, width) of a segmentation. With `route`, a task has a
            row for each image that asked for it, in their order; `rows(route)` says which.

        Raises:
            EngramError: A task is not attached, the pixels have the wrong shape or type, or the
                route has not one entry for each image or a task that changes the trunk.

        Examples:
            >>> logits = model(torch.rand(4, 3, 32, 32), tasks=["flowers"])
            >>> logits["flowers"].shape
            torch.Size([4, 2])
            >>> logits = model(torch.rand(3, 3, 32, 32), route=["flowers", None, "flowers"])
            >>> logits["flowers"].shape, logits["base"].shape
            (torch.Size([2, 2]), torch.Size([1, 10]))
        """
        seen, rows = self._seen(self.output_names, pixels, tasks, exact, route)
        return _of_rows({name: self._head(name, sight) for name, sight in seen.items()}, rows)

    def rows(self, route: Sequence[Entry]) -> dict[str, list[int]]:
        """The images that ask for each task of a route: the rows of its answers.

        Args:
            route: What each image is asked for, as in a call of the model.

        Returns:
            The places of images in the batch, by task.

        Raises:
            EngramError: An entry is neither a name, nor a list of names, nor None.

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
        """One vector per image of the trunk and of every task: what a head is given of the image.

        `"base"` is the trunk's pooled token after the final norm: its class token, or the mean of
        the patches where it has none. What a task adds depends on its regime:

        - `head`, `mlp-head`: the trunk's pooled token, the same as `"base"`.
        - `masked`, `masked+adapter`: the task's own class token (the mean, if it has several).
        - `readout`: the moments of all layers that its head reads, and the squares if it does.
        - `side`, `side+readout`: the pooled token or the moments, then the pooled side patches.
        - all others: the pooled token of the pass that the task changed.

        A segmentation has the mean over patches of what its head is given of each patch, or its
        own class tokens' mean where it has some.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            tasks: The tasks to embed for; `"base"` is the trunk. By default `"base"` and all.
            exact: As in a call of the model: bit for bit what it would be without other tasks.
            route: As in a call of the model: what each image is asked for.

        Returns:
            The vectors (images, numbers) by name. Tasks may differ in how many numbers they have.
            With `route`, those of the images that asked.

        Raises:
            EngramError: A task is not attached, or the pixels have the wrong shape or type.

        Examples:
            >>> vectors = model.embed(torch.rand(4, 3, 32, 32))
            >>> vectors["base"].shape, vectors["flowers"].shape
            (torch.Size([4, 192]), torch.Size([4, 192]))
        """
        seen, rows = self._seen(self.embedding_names, pixels, tasks, exact, route)
        return _of_rows({name: self._vector(name, sight) for name, sight in seen.items()}, rows)

    def scored(
        self,
        pixels: Tensor,
        tasks: Sequence[str] | None = None,
        exact: bool = False,
        route: Sequence[Entry] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Answer tasks as a call of the model does, and say how familiar the images look to each.

        Args:
            pixels: Normalised pixels (images, 3, height, width).
            tasks: The tasks to answer, as in a call of the model.
            exact: As in a call of the model.
            route: As in a call of the model: what each image is asked for.

        Returns:
            The outputs by task name, and the scores (images) of the tasks that keep statistics of
            their training images. Higher is more like those: a score of 1 is as usual for
            validation images, and 5 % of them are below 0.

        Raises:
            EngramError: A task is not attached, or the pixels have the wrong shape or type.

        Examples:
            >>> outputs, scores = model.scored(torch.rand(4, 3, 32, 32), tasks=["flowers"])
            >>> outputs["flowers"].shape
            torch.Size([4, 2])
        """
        seen, rows = self._seen(self.output_names, pixels, tasks, exact, route)
        scores = {}
        for name, sight in seen.items():
            if isinstance(sight, Sight) and (kept := self.task(name).statistics) is not None:
                scores[name] = kept.score(self._vector(name, sight))
        outputs = {name: self._head(name, sight) for name, sight in seen.items()}
        return _of_rows(outputs, rows), _of_rows(scores, rows)

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

    def output_names(self, tasks: Sequence[str] | None = None) -> list[str]:
        """What a call with these `tasks` answers; without, "base" (if it has a head) and all."""
        if tasks is None:
            return (["base"] if self.trunk.head is not None else []) + list(self.registry)
        if "base" in tasks and self.trunk.head is None:
            raise EngramError(
                f"The trunk {self.trunk.source} has no head of its own, so there is no 'base'."
            )
        return self.embedding_names(tasks)

    def embedding_names(self, tasks: Sequence[str] | None = None) -> list[str]:
        """What `embed` gives for these `tasks`; without, "base" and all."""
        if tasks is None:
            return ["base", *self.registry]
        if isinstance(tasks, str):
            raise EngramError(f"tasks is the text {tasks!r}; give a list such as [{tasks!r}].")
        names = list(dict.fromkeys(tasks))
        for name in names:
            if name != "base":
                self.task(name)
        return names

    def _seen(
        self,
        known: Callable[[Sequence[str] | None], list[str]],
        pixels: Tensor,
        tasks: Sequence[str] | None,
        exact: bool,
        route: Sequence[Entry] | None,
    ) -> tuple[dict[str, Sight | BaseSight], Mapping[str, Sequence[int]] | None]:
        """What the heads are given, and which rows of what they make of it are asked for.

        None: all. `exact` computes a route for all images: the last bits depend on how many share a
        product.
        """
        if route is None:
            return sights(self, known(tasks), pixels, exact), None
        asked = Route(route, known(tasks or ()))
        names = known(list(asked.rows))
        check_regimes(self, names)
        if not exact:
            return routed_sights(self, asked, pixels), None
        seen = sights(self, names, pixels, exact)
        asked.check(len(pixels))
        return seen, asked.rows

    def _vector(self, name: str, seen: Sight | BaseSight) -> Tensor:
        """The embedding of "base" or of a task."""
        if isinstance(seen, BaseSight):
            return self.trunk.pool(seen.tokens)
        return self.task(name).head.embed(seen.own, seen.patches)

    def _head(self, name: str, seen: Sight | BaseSight) -> Tensor:
        """The output of "base" or of a task."""
        if isinstance(seen, BaseSight):
            assert self.trunk.head is not None
            output: Tensor = self.trunk.head(seen.raw, seen.tokens)
            return output
        return self.task(name).head.read(seen.own, seen.patches)

    def from_cache(
        self,
        layers: CachedLayers,
        pooled: Tensor,
        tasks: Sequence[str],
        final: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> dict[str, Tensor]:
        """Logits of tasks that leave the trunk alone, from what `cache.Cache` kept of it.

        `layers` are the trunk's normed tokens (b, n, D) of every layer, or for masked tasks its
        keys and values, `pooled` (b, D) its last token.
        Tasks that read all of the last tokens need the `final` normed ones (b, n, D), too, and
        those that answer for every pixel the (height, width) of the images. So does a trunk with
        rotary positions, unless they have the size of the preprocessing.
        """
        seen = sights_from_cache(self, layers, pooled, tasks, final, size)
        return {name: self._head(name, sight) for name, sight in seen.items()}

    def from_pass(
        self, passed: Pass, tasks: Sequence[str], size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Outputs of "base" and of tasks that leave the trunk alone, from a pass made elsewhere.

        `size` is the (height, width) of the images.
        """
        seen = sights_from_pass(self, passed, tasks, size)
        return {name: self._head(name, sight) for name, sight in seen.items()}

    def from_moments(self, moments: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Logits of readouts and heads, from all moments and squares (b, features)."""
        heads = {name: self.task(name).head for name in tasks}
        return {n: head.read(moments[:, : head.in_features], None) for n, head in heads.items()}

    def moments(self, pixels: Tensor) -> Tensor:
        """What a `readout` of all layers and squares sees of these images: (b, features)."""
        size = pixels.shape[-2:]
        moments = Moments(self.trunk, squares_of(self.trunk, size, pixels.device))
        with self.trunk.products():
            raw = self.trunk.encode(self.trunk.embed(pixels), size, moments.see)
            moments.see(self.trunk.config.depth, self.trunk.norm(raw))
            return self.trunk.unrounded(moments.last(len(moments.layers), squares=True))

    def sides(self, names: Sequence[str]) -> Sides:
        """The side patches of these tasks and of all they extend, parents first."""
        return sides_of(self.registry, names)

    def memory(self, names: Sequence[str]) -> Memory:
        """The streams of these masked tasks and of all they read, parents first."""
        return memory_of(self.trunk, self.registry, names)

    def constant(self, tasks: Sequence[str], size: tuple[int, int]) -> MemoryViT:
        """A copy in which all that depends on no image is computed, to be traced into a graph.

        It answers these tasks for images of this (height, width), and cannot be trained.
        """
        fixed = MemoryViT(self.trunk.at_size(size), unmasked=self.registry.unmasked)
        for task in self.registry.values():
            own = copy.deepcopy(task)
            own.trunk = None if own.trunk is None else own.trunk.at_size(size)
            fixed._put(own)
        fixed.to("cpu").eval().requires_grad_(False)
        masked = [n for n in tasks if n != "base" and fixed.task(n).spec.parts.masked]
        side = [n for n in tasks if n != "base" and fixed.task(n).spec.parts.side]
        with torch.no_grad():
            for trunk in (fixed.trunk, *(task.trunk for task in fixed.tasks.values())):
                if trunk is not None:
                    trunk.keep_positions()
            if masked:
                memory = fixed.prepared.constant = fixed.memory(masked)
                for layer, block in enumerate(fixed.trunk.layers):
                    memory.keys_values(layer, block)
            if side:
                fixed.prepared.constant_sides = fixed.sides(side)
        return fixed


def _of_rows(
    outputs: dict[str, Tensor], rows: Mapping[str, Sequence[int]] | None
) -> dict[str, Tensor]:
    return outputs if rows is None else {n: output[rows[n]] for n, output in outputs.items()}
