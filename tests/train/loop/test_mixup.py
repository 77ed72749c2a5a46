"""Mixup: pairs of images and of their labels, the same for the same seed, step and process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.training import fit_until, learned, same, start

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits, load
from engram.train.features.feeds import BatchShard
from engram.train.loop.mixup import Mixup, parts
from engram.train.loop.task_trainer import TaskTrainer

CPU = torch.device("cpu")
QUICK = Recipe(steps=8, batch=16, workers=0)


def test_pairs_depend_on_the_seed_alone() -> None:
    first, again = (Mixup.drawn(40, 0.2, [0, 5, 0, 1]) for _ in range(2))
    assert torch.equal(first.partners, again.partners)
    assert torch.equal(first.shares, again.shares)
    assert sorted(first.partners.tolist()) == list(range(40))
    assert bool(((first.shares >= 0) & (first.shares <= 1)).all())
    assert not torch.equal(first.partners, Mixup.drawn(40, 0.2, [0, 6, 0, 1]).partners)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_a_batch_is_mixed_the_same_in_parts(dtype: torch.dtype) -> None:
    share = BatchShard((torch.rand(7, 3, 2) * 200).to(dtype), torch.arange(7), torch.arange(7))
    mixup = Mixup.drawn(7, 1.0, [0])
    ((whole, targets, _),) = parts(share, 7, mixup, CPU)
    split = list(parts(share, 3, mixup, CPU))
    assert torch.equal(torch.cat([inputs for inputs, _, _ in split]), whole)
    assert whole.dtype == dtype
    (own, kept), (other, rest) = targets
    assert kept is not None
    assert rest is not None
    assert torch.equal(kept + rest, torch.ones(7))
    weight = kept[:, None, None]
    expected = weight * share.inputs[own].float() + (1 - weight) * share.inputs[other].float()
    assert (whole.float() - expected).abs().max() <= (0.5 if dtype == torch.uint8 else 0.1)


def test_the_loss_is_that_of_the_mixed_label(small_backbone: Path, colours: Path) -> None:
    trainer = TaskTrainer(
        start(small_backbone, load(colours)), "colours", Recipe(label_smoothing=0.1)
    )
    logits, share = torch.randn(4, 3), torch.rand(4)
    first, second = torch.tensor([0, 1, 2, 1]), torch.tensor([2, 1, 0, 0])
    soft = share[:, None] * F.one_hot(first, 3) + (1 - share[:, None]) * F.one_hot(second, 3)
    expected = F.cross_entropy(logits, soft, reduction="sum", label_smoothing=0.1)
    found = trainer.loss(logits, [(first, share), (second, 1 - share)])
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("cache", ["on", "off"])
def test_mixed_images_are_learned_from(cache: str, small_backbone: Path, colours: Path) -> None:
    splits, recipe = load(colours), QUICK.but(cache=cache)
    mixed = learned(small_backbone, splits, recipe.but(mixup=0.4))
    assert same(mixed, learned(small_backbone, splits, recipe.but(mixup=0.4)))
    assert not same(mixed, learned(small_backbone, splits, recipe))


def test_a_resumed_run_mixes_and_samples_the_same(
    small_backbone: Path, flowers: Path, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole.safetensors", tmp_path / "resumed.safetensors"
    fit_until(small_backbone, flowers, whole, mixup=0.4, balance="sampler")
    fit_until(small_backbone, flowers, resumed, stop=3, mixup=0.4, balance="sampler")
    with pytest.raises(EngramError, match="other settings"):
        fit_until(small_backbone, flowers, resumed, resume=True)
    fit_until(small_backbone, flowers, resumed, resume=True, mixup=0.4, balance="sampler")
    assert engram.inspect(whole).content == engram.inspect(resumed).content


def test_a_solved_head_cannot_be_mixed(model: MemoryViT, splits: Splits) -> None:
    model.add_task("t", splits.classes, regime="readout")
    with pytest.raises(EngramError, match=r"mixup is 0\.2"):
        engram.fit(model, "t", splits, QUICK.but(mixup=0.2))
