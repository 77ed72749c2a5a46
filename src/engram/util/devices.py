"""Devices by name, autocast, and copies to a GPU without synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.util.flag_names import flag


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
