"""The ways through a model, which all give the same outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor

from engram import MemoryViT, ViT

Pass = Callable[[MemoryViT, Tensor], dict[str, Tensor]]


def without_gradients(exact: bool) -> Pass:
    def answer(model: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return model(pixels, exact=exact)

    return answer


def checkpointed(model: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
    can = model.backbone.config.rotary is None
    with mock.patch("engram.methods.forward.reads_checkpointed", return_value=can):
        return model(pixels)


#: Those that build no graph come first.
PATHS: dict[str, Pass] = {
    "fast": without_gradients(exact=False),
    "exact": without_gradients(exact=True),
    "training": lambda model, pixels: model(pixels),
    "training, checkpointed": checkpointed,
    "training exactly": lambda model, pixels: model(pixels, exact=True),
}
TRAINING = [name for name in PATHS if name.startswith("training")]


def normed_of_every_layer(vit: ViT, pixels: Tensor) -> list[Tensor]:
    """What a cache holds: each layer's normed tokens of the plain backbone."""
    layers: list[Tensor] = []
    vit.encode(vit.embed(pixels), pixels.shape[-2:], lambda _, normed: layers.append(normed))
    return layers


def assert_same(
    path: str, found: dict[str, Tensor], wanted: dict[str, Tensor], **close: float
) -> None:
    """Outputs of a way, in the order of the reference; one from the cache has no `base`."""
    assert list(found) == list(wanted)[path.startswith("from the cache") :], path
    for name, logits in found.items():
        said = f"{name}, {path}: "
        torch.testing.assert_close(
            logits, wanted[name], msg=lambda m, said=said: f"{said}{m}", **close
        )


def assert_same_gradients(
    path: str,
    model: MemoryViT,
    outputs: dict[str, Tensor],
    wanted: Sequence[Tensor],
    **close: float,
) -> None:
    """Gradients of all that the tasks of a model have to learn."""
    named = [(f"{t}.{n}", p) for t, k in model.tasks.items() for n, p in k.named_parameters()]
    found = torch.autograd.grad(loss(outputs), [parameter for _, parameter in named])
    for (name, _), ours, theirs in zip(named, found, wanted, strict=True):
        said = f"{name}, {path}: "
        torch.testing.assert_close(ours, theirs, msg=lambda m, said=said: f"{said}{m}", **close)


def loss(logits: dict[str, Tensor]) -> Tensor:
    """A number in which every logit of every task counts differently."""
    parts = [
        (logits[name] * torch.linspace(-1, 2, logits[name].numel()).view_as(logits[name])).sum()
        for name in sorted(logits)
        if name != "base"
    ]
    return torch.stack(parts).sum()
