"""Tensors as values: a hash of what they hold, and whether they were written since."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


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
