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

Route: TypeAlias = Sequence[Sequence[str]] | None  # the tasks of each image
Computed: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]  # outputs, familiarity, by task


def familiarity_name(task: str) -> str:
    """The familiarity of a task among outputs by name. No task can have such a name."""
    return f"{task}:familiarity"


class Engine(ABC):
    """Computes the outputs of a model that does not change any more."""

    @abstractmethod
    def with_familiarity(self, pixels: Tensor, tasks: Sequence[str]) -> Computed:
        """What `MemoryViT.with_familiarity` gives, on the device where it was computed."""

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Outputs by task ("base" is the backbone's own) for normalised pixels (b, 3, h, w)."""
        return self.with_familiarity(pixels, tasks)[0]


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

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        with self._inference():
            pixels = to_device(pixels, self.device)
            outputs: dict[str, Tensor] = self.model(pixels, list(tasks), self.exact)
        return outputs

    def with_familiarity(
        self, pixels: Tensor, tasks: Sequence[str], route: Route = None
    ) -> Computed:
        with self._inference():
            pixels = to_device(pixels, self.device)
            return self.model.with_familiarity(pixels, list(tasks), self.exact, route)

    def embed(
        self, pixels: Tensor, names: Sequence[str] | None = None, route: Route = None
    ) -> dict[str, Tensor]:
        with self._inference():
            return self.model.embed(to_device(pixels, self.device), names, self.exact, route)

    def with_base(
        self, pixels: Tensor, tasks: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """`with_familiarity`, and the backbone's vectors of `embed`, in one pass."""
        with self._inference():
            return self.model.with_base(to_device(pixels, self.device), list(tasks), self.exact)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        fp32 = self.dtype == torch.float32
        cast = nullcontext() if fp32 else torch.autocast(self.device.type, self.dtype)
        with torch.inference_mode(), cast:
            yield


class EngineSettings(Protocol):
    """What any settings say about an engine."""

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


def on_cpu(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, fetched once for the whole pass: to look at a GPU's tensor is to wait for it."""
    return {name: output.float().cpu() for name, output in outputs.items()}


class OneByOne(Engine):
    """Runs an engine on one image at a time: last bits of a product depend on how many share it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def with_familiarity(self, pixels: Tensor, tasks: Sequence[str]) -> Computed:
        single = torch.split(pixels, 1)
        return join_images([self.engine.with_familiarity(one, tasks) for one in single], tasks)


def join_images(parts: Sequence[Computed], tasks: Sequence[str]) -> Computed:
    """dict[str, Tensor] and familiarity of single images as those of a batch."""
    outputs, familiarity = (
        {n: torch.cat([part[i][n] for part in parts]) for n in tasks if n in parts[0][i]}
        for i in (0, 1)
    )
    return outputs, familiarity


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
