"""Tensors as values: their hash, and whether they were written since."""

import pytest
import torch

from engram.util.tensors import tensors_hash, version


def test_the_fingerprints_definition_stays() -> None:
    """Engrams in the world carry it: names in order, shapes, little-endian fp32."""
    tensors = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([0.5], dtype=torch.float16)}
    expected = "9d578d4a366e4a5a7e0ebc1a5d37b85bb563740d31446a151567c7bb1c49ff5a"
    assert tensors_hash(tensors) == expected
    assert tensors_hash({**tensors, "b": tensors["b"].T}) != expected
    assert tensors_hash({"c": tensors["b"], "a": tensors["a"]}) != expected
    strided = torch.tensor([[1.0, 9.0, 2.0, 9.0]])[:, ::2]
    assert tensors_hash({**tensors, "b": strided}) == expected


def test_the_hash_does_not_depend_on_order_or_gradients() -> None:
    a, b = torch.randn(3), torch.randn(2, 2)
    before = tensors_hash({"a": a, "b": b})
    assert tensors_hash({"b": b.requires_grad_(), "a": a}) == before
    assert tensors_hash({"a": a, "b": b.detach().double()}) == before
    assert tensors_hash({}) != before


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2),
        lambda x: x.__setitem__(0, 5.0),
        lambda x: x[1:].zero_(),
        lambda x: x.copy_(torch.ones(3)),
    ],
    ids=["in place", "one element", "through a view", "copied"],
)
def test_a_write_changes_the_version(write: object) -> None:
    tensor = torch.zeros(3)
    before = version(tensor)
    assert version(tensor) == before
    write(tensor)  # type: ignore[operator]
    assert version(tensor) != before


def test_another_place_or_type_is_another_version() -> None:
    tensor = torch.zeros(3)
    assert version(tensor.clone()) != version(tensor)
    assert version(tensor.double()) != version(tensor)


def test_a_tensor_of_inference_mode_has_a_version() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
        assert version(tensor) == version(tensor)
        assert version(tensor.clone()) != version(tensor)
