"""The device that a name means, and copies to it."""

from __future__ import annotations

import pytest
import torch
from tests.support.devices import accelerator

from engram import EngramError
from engram.util.processes import ProcessGroup
from engram.util.tensors import device_for, devices, to_device


def test_the_cpu_is_always_there() -> None:
    assert devices()[0] == "cpu"
    assert device_for("cpu") == torch.device("cpu")


def test_auto_takes_an_accelerator_if_there_is_one() -> None:
    there = torch.accelerator.is_available()
    assert (device_for("auto").type != "cpu") == there
    assert ProcessGroup().device == device_for("auto")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cpu:1", "meta", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(EngramError, match=rf"device is '{name}'.* finds only cpu"):
        device_for(name)


def test_torchrun_gives_every_process_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("engram.util.tensors.devices", lambda: ["cpu", "cuda:0", "cuda:1"])
    with pytest.raises(EngramError, match="torchrun started several processes"):
        ProcessGroup("cuda:1")


def test_a_copy_to_a_device_has_the_same_values() -> None:
    values = torch.arange(6).view(2, 3)
    assert to_device(values, torch.device("cpu")) is values
    assert to_device(values, torch.device("meta")).shape == (2, 3)


@accelerator
def test_a_copy_to_an_accelerator_comes_back_equal() -> None:
    values = torch.arange(6, dtype=torch.uint8)
    there = to_device(values, device_for("auto"))
    assert there.device.type == device_for("auto").type
    assert torch.equal(there.cpu(), values)
