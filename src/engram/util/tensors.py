"""Tensors as values: a hash of what they hold, and whether they were written since."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

_Value = TypeVar("_Value")


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
