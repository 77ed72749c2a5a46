"""Promises 1 to 3 on a real ViT with 20 tasks of every regime that leaves it alone attached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.regimes import known
from tests.support.strategies import scatter
from torch import Tensor, nn

from engram import MemoryViT, ViT, load_backbone
from engram.train.loop.trainable import train_only
from engram.util.tensors import tensors_hash

FOLDER = "weights/vit_tiny_patch16_224"
CLOSE = {"rtol": 1e-6, "atol": 1e-5}


@pytest.fixture(scope="module")
def backbone(assets: Path) -> ViT:
    return load_backbone(assets / FOLDER / "timm.safetensors")


@pytest.fixture(scope="module")
def pixels(assets: Path) -> Tensor:
    return load_file(assets / FOLDER / "reference.safetensors")["pixel_values"][:2]


def parents(i: int) -> list[str]:
    """Every third task extends the one before it, every sixth another one too."""
    return [f"task{j}" for j in ([i - 1] if i % 3 == 2 else []) + ([i - 4] if i % 6 == 5 else [])]


def regime(i: int) -> str:
    """Tasks 12 to 17 have side network, one is a readout, and one in four masked ones adapters."""
    if i == 18:
        return "readout"
    if 12 <= i < 18:
        return "side+readout" if i == 16 else "side"
    return "masked+adapter" if i % 4 == 3 else "masked"


def add(model: MemoryViT, i: int) -> None:
    settings = known(regime(i), cells=i % 6, tokens=2 if i == 7 else 1, adapter_width=8)
    task = model.add_task(f"task{i}", classes=10, extends=parents(i), regime=regime(i), **settings)
    scatter(task, by=0.02, seed=i)


def lineage(i: int) -> Iterator[int]:
    for parent in parents(i):
        yield from lineage(int(parent[4:]))
    yield i


@pytest.fixture(scope="module")
def crowd(backbone: ViT) -> MemoryViT:
    model = MemoryViT(backbone).eval()
    for i in range(20):
        add(model, i)
    return model


@pytest.fixture(scope="module")
def exact(crowd: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return crowd(pixels, exact=True)


@pytest.fixture(scope="module")
def fast(crowd: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return crowd(pixels)


def test_base_is_bit_for_bit_the_plain_backbone(
    backbone: ViT, pixels: Tensor, exact: dict[str, Tensor]
) -> None:
    with torch.no_grad():
        assert torch.equal(exact["base"], backbone(pixels))


def test_base_is_the_plain_backbone_in_the_fast_path(
    backbone: ViT, pixels: Tensor, fast: dict[str, Tensor]
) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fast["base"], backbone(pixels), **CLOSE)


def test_fast_answers_are_the_exact_ones(fast: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    for name in exact:
        torch.testing.assert_close(fast[name], exact[name], **CLOSE)


@pytest.mark.parametrize("i", range(20))
def test_a_task_among_twenty_is_the_task_alone(
    crowd: MemoryViT, pixels: Tensor, fast: dict[str, Tensor], exact: dict[str, Tensor], i: int
) -> None:
    alone = MemoryViT(crowd.backbone).eval()
    for j in dict.fromkeys(lineage(i)):
        add(alone, j)
        alone.task(f"task{j}").load_state_dict(crowd.task(f"task{j}").state_dict())
    name = f"task{i}"
    with torch.no_grad():
        assert torch.equal(alone(pixels, tasks=[name], exact=True)[name], exact[name])
        torch.testing.assert_close(alone(pixels, tasks=[name])[name], fast[name], **CLOSE)


@pytest.mark.parametrize("name", ["task17", "task19"])  # a side task with parents, a masked one
def test_training_one_task_leaves_backbone_and_other_tasks_bit_for_bit(
    crowd: MemoryViT, pixels: Tensor, exact: dict[str, Tensor], name: str
) -> None:
    hashes = {n: tensors_hash(task.tensors()) for n, task in crowd.tasks.items()}
    backbone = tensors_hash(crowd.backbone.state_dict())
    kept = {n: x.clone() for n, x in crowd.task(name).state_dict().items()}
    optimiser = torch.optim.AdamW([p for _, p in train_only(crowd, name)], lr=0.01)
    for _ in range(2):
        optimiser.zero_grad()
        nn.functional.cross_entropy(
            crowd(pixels, tasks=[name])[name], torch.tensor([0, 1])
        ).backward()
        optimiser.step()
    changed = [n for n, task in crowd.tasks.items() if tensors_hash(task.tensors()) != hashes[n]]
    assert changed == [name]
    assert tensors_hash(crowd.backbone.state_dict()) == backbone
    with torch.no_grad():
        after = crowd(pixels, exact=True)
    assert [n for n in exact if not torch.equal(exact[n], after[n])] == [name]
    crowd.task(name).load_state_dict(kept)
