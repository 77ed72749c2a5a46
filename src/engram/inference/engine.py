"""Engines: pixels and task names in, outputs out, of the model itself or of an exported graph."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from engram.images.preprocessing import Preprocessing, normalise
from engram.model import MemoryViT
from engram.store.bundles import read_engrams
from engram.util.hub import PathOrHubId
from engram.util.processes import ProcessGroup, dtype_for
from engram.util.tensors import to_device

Outputs: TypeAlias = dict[str, Tensor]  # by name: of tasks, and their familiarity
Route: TypeAlias = Sequence[Sequence[str]] | None  # the tasks of each image


def familiarity_name(task: str) -> str:
    """The familiarity of a task among outputs by name. No task can have such a name."""
    return f"{task}:familiarity"


def by_output(outputs: Mapping[str, Tensor], familiarity: Mapping[str, Tensor]) -> Outputs:
    """Outputs and familiarity of `MemoryViT.with_familiarity` under their names."""
    return {**outputs, **{familiarity_name(name): own for name, own in familiarity.items()}}


def asked_for(outputs: Mapping[str, Tensor], tasks: Sequence[str], familiarity: bool) -> Outputs:
    """Of these outputs those of tasks, and their familiarity where there is one."""
    names = [*tasks, *(map(familiarity_name, tasks) if familiarity else ())]
    return {name: outputs[name] for name in names if name in outputs}


class Engine(ABC):
    """Computes the outputs of a model that does not change any more."""

    @abstractmethod
    def run(self, pixels: Tensor, tasks: Sequence[str], familiarity: bool = False) -> Outputs:
        """Outputs by task ("base" is the backbone's own) for normalised pixels (b, 3, h, w).

        With `familiarity` also that of tasks that keep statistics, by `familiarity_name`. They are
        where they were computed; `on_cpu` fetches them.
        """


class TorchEngine(Engine):
    """The model itself; with `exact`, every answer is bit for bit what it would be alone.

    It moves the model to `device`, if one is given. `precision` is the numeric precision of
    forward passes: `bf16` and `fp16` autocast, and change answers slightly.
    """

    def __init__(
        self,
        model: MemoryViT,
        exact: bool = False,
        device: torch.device | None = None,
        precision: str = "fp32",
    ) -> None:
        self.device = device or model.backbone.device
        self.model, self.exact = model.to(self.device).eval(), exact
        self.dtype = dtype_for(precision, self.device)

    def run(
        self,
        pixels: Tensor,
        tasks: Sequence[str],
        familiarity: bool = False,
        route: Route = None,
    ) -> Outputs:
        with self._inference():
            asked = to_device(pixels, self.device), list(tasks), self.exact, route
            if familiarity:
                return by_output(*self.model.with_familiarity(*asked))
            outputs: Outputs = self.model(*asked)
            return outputs

    def embed(
        self, pixels: Tensor, names: Sequence[str] | None = None, route: Route = None
    ) -> Outputs:
        with self._inference():
            return self.model.embed(to_device(pixels, self.device), names, self.exact, route)

    def with_base(self, pixels: Tensor, tasks: Sequence[str]) -> tuple[Outputs, Outputs, Tensor]:
        """`MemoryViT.with_base`: outputs, familiarity, and the backbone's vectors of `embed`."""
        with self._inference():
            return self.model.with_base(to_device(pixels, self.device), list(tasks), self.exact)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        fp32 = self.dtype == torch.float32
        cast = nullcontext() if fp32 else torch.autocast(self.device.type, self.dtype)
        with torch.inference_mode(), cast:
            yield


class EngineSettings(Protocol):
    """The choice of an engine that any settings have."""

    @property
    def engine(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...


MakeEngine: TypeAlias = Callable[[MemoryViT, EngineSettings], Engine]


def torch_engine(model: MemoryViT, settings: EngineSettings) -> Engine:
    """The model itself, on the device of the settings."""
    device = ProcessGroup(settings.device).device
    return TorchEngine(model, device=device, precision=settings.precision)


def stack_views(
    views: Sequence[Tensor], preprocessing: Preprocessing, device: torch.device
) -> Tensor:
    """One batch of views: uint8 (h, w, 3), which are copied as such, or pixels (3, h, w)."""
    alike = len({view.dtype for view in views}) == 1
    batches = [torch.stack(list(views))] if alike else [view[None] for view in views]
    return torch.cat([normalise(to_device(one, device), preprocessing) for one in batches])


def on_cpu(outputs: Mapping[str, Tensor]) -> Outputs:
    """Outputs, fetched once for the whole pass: to look at a GPU's tensor is to wait for it."""
    return {name: output.float().cpu() for name, output in outputs.items()}


class OneByOne(Engine):
    """Runs an engine on one image at a time: last bits of a product depend on how many share it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, pixels: Tensor, tasks: Sequence[str], familiarity: bool = False) -> Outputs:
        single = torch.split(pixels, 1)
        return join_images([self.engine.run(one, tasks, familiarity) for one in single])


def join_images(parts: Sequence[Mapping[str, Tensor]]) -> Outputs:
    """The outputs of single images as those of a batch."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def load_model(
    sources: PathOrHubId | Sequence[PathOrHubId],
    backbone: PathOrHubId | None = None,
    *,
    backbone_dtype: str = "fp32",
) -> MemoryViT:
    """A model from engrams or bundles: the backbone that they name, with all of them attached.

    Images are prepared as they were when the engrams were trained.

    Args:
        sources: Files of engrams, bundles, or either on the Hub (`hf:owner/name`).
        backbone: Path or Hub id of the backbone, if it is not where the engrams say.
        backbone_dtype: `bf16` keeps the weights of the backbone in half precision: half the memory.

    Returns:
        The model, in evaluation mode.

    Raises:
        EngramError: The engrams do not fit together, or not the backbone.

    Examples:
        >>> model = engram.load_model(["flowers.safetensors"])
        >>> list(model.tasks)
        ['flowers']
    """
    engrams = read_engrams([sources] if isinstance(sources, (str, os.PathLike)) else sources)
    return MemoryViT.from_engrams(engrams, backbone, backbone_dtype=backbone_dtype)
