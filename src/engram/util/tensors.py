"""Tensors: where they are computed and in which type, their hash, and whether they were written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engram.errors import EngramError, flag

_Value = TypeVar("_Value")


# Devices


def devices() -> list[str]:
    """The names of what this machine can compute on, as torch sees it; accelerators come last."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return ["cpu"]
    if accelerator.type == "mps":  # there is one, and it has no number
        return ["cpu", "mps"]
    return ["cpu", *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]


def device_for(name: str = "auto") -> torch.device:
    """The device of this name; an EngramError that lists what is there if it is not.

    It is `auto`, `cpu`, or a kind of accelerator, with a number where there are several.
    """
    here = devices()
    if name == "auto":
        return torch.device(here[-1].partition(":")[0])
    kinds = [one.partition(":")[0] for one in here]
    if name not in here and name not in kinds:
        raise EngramError(
            f"{flag('device')} is {name!r}, but PyTorch finds only {', '.join(here)} here; choose "
            "one of these, or auto."
        )
    return torch.device(name)


def wait_for(device: torch.device) -> None:
    """Wait until the device is idle, so that a clock can be read."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast's matrix products on this device; None where it is off."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A copy to CUDA leaves from pinned memory, so nothing waits for it.

    `torch.tensor(values, device=…)` and `.to(device)` would wait until the GPU has done all that
    was asked of it before.
    """
    if device.type == "cuda" and tensor.is_cpu:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# Values


def tensors_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, shapes and values (as little-endian fp32), in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()


def version(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Changes when the tensor is written in place, moved or cast.

    Fused optimisers and what writes to `.data` go unseen: a pass that learns must drop what was
    kept by it. So do writes to tensors that were made in inference mode, which count none.
    """
    writes = 0 if tensor.is_inference() else tensor._version
    return writes, tensor.data_ptr(), tensor.dtype


class VersionedCache(Generic[_Value]):
    """Values by key, made again when a tensor that they were made from has changed.

    The least recently used go first once there are more than `size`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: dict[object, tuple[object, _Value]] = {}  # the newest is last

    def clear(self) -> None:
        self._values.clear()

    def get(self, key: object, tensors: Iterable[Tensor], make: Callable[[], _Value]) -> _Value:
        state = tuple(map(version, tensors))
        found = self._values.pop(key, None)
        if found is None or found[0] != state:
            found = (state, make())
        self._values[key] = found
        while len(self._values) > self.size:
            del self._values[next(iter(self._values))]
        return found[1]
