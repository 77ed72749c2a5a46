"""Embeddings of a model: what each head is given, and nothing that other tasks could change."""

from __future__ import annotations

import pytest
import torch
from tests.support.engrams import randomised
from tests.support.regimes import SUPERVISED, known
from torch import Tensor

from engram import EngramError, MemoryViT, random_backbone

PIXELS = (3, 3, 32, 32)


def model_with(regime: str, kind: str = "classification", **backbone: object) -> MemoryViT:
    model = MemoryViT(random_backbone(**backbone)).eval()  # type: ignore[arg-type]
    randomised(
        model.add_task("t", ["a", "b"], regime=regime, kind=kind, **known(regime, cells=3, rank=4))
    )
    return model


@torch.no_grad()
def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("regime", SUPERVISED)
def test_the_head_makes_the_answer_from_the_embedding(regime: str) -> None:
    model, pixels = model_with(regime), torch.rand(*PIXELS)
    vectors = model.embed(pixels)
    assert list(vectors) == ["base", "t"]
    assert vectors["t"].shape == (3, model.task("t").head.in_features)
    assert close(model.task("t").head(vectors["t"]), model(pixels)["t"])


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("classes", [5, 0])
def test_base_is_the_pooled_token_with_or_without_a_head(class_token: bool, classes: int) -> None:
    prefix = {} if class_token else {"class_token": False, "prefix_positions": 0}
    model, pixels = model_with("masked", classes=classes, **prefix), torch.rand(*PIXELS)
    tokens = model.backbone.tokens(pixels)
    pooled = tokens[:, 0] if class_token else tokens.mean(1)
    assert close(model.embed(pixels)["base"], pooled)
    assert torch.equal(model.embed(pixels, ["base"], exact=True)["base"], pooled)


def test_one_vector_of_a_segmentation_is_a_mean() -> None:
    pixels = torch.rand(*PIXELS)
    model = model_with("head", "segmentation")
    patches = model.backbone.tokens(pixels)[:, model.backbone.config.prefix :]
    assert close(model.embed(pixels)["t"], patches.mean(1))
    width = model.backbone.config.width
    assert model_with("side", "segmentation").embed(pixels)["t"].shape == (3, width + 4)
    masked = model_with("masked", "segmentation")
    assert masked.embed(pixels)["t"].shape == (3, width)
    assert not close(masked.embed(pixels)["t"], masked.embed(pixels)["base"])


def test_an_embedding_does_not_depend_on_unrelated_tasks() -> None:
    model, pixels = model_with("masked"), torch.rand(*PIXELS)
    before, fast = model.embed(pixels, exact=True), model.embed(pixels)
    randomised(model.add_task("other", 3, regime="side", rank=2))
    randomised(model.add_task("third", 2))
    after = model.embed(pixels, exact=True)
    for name, vectors in before.items():
        assert torch.equal(after[name], vectors)
        assert close(model.embed(pixels)[name], fast[name])


def test_only_the_embeddings_that_were_asked_are_given() -> None:
    model, pixels = model_with("masked"), torch.rand(*PIXELS)
    assert list(model.embed(pixels, tasks=["t"])) == ["t"]
    assert list(model.embed(pixels, tasks=["t", "base", "t"])) == ["t", "base"]
    with pytest.raises(EngramError, match="There is no task 'u'"):
        model.embed(pixels, tasks=["u"])
    with pytest.raises(EngramError, match="give a list such as"):
        model.embed(pixels, tasks="base")
