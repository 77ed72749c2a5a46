"""Kinds of task: each keeps every promise, in the model, in its file and in what it answers."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.engrams import randomised, small_backbone
from tests.support.regimes import class_count, known, teaches

from engram import MemoryViT
from engram.methods import METHODS
from engram.tasks.kind import IGNORED
from engram.tasks.kinds import KINDS

SHAPES = {
    "classification": (3,),
    "multilabel": (3,),
    "regression": (3,),
    "segmentation": (3, 16, 24),
    "anomaly": (4, 6),
}
SHARING = [name for name, regime in METHODS.items() if regime.shares_pass]


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.rand(2, 3, 16, 24)  # not square, and not the backbone's own size


# The model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", METHODS)
def test_every_kind_answers_in_every_regime(kind: str, regime: str, pixels: torch.Tensor) -> None:
    if not teaches(regime, kind):
        pytest.skip("the regime teaches no such task")
    model = MemoryViT(small_backbone(patch=4)).eval()
    task = randomised(
        model.add_task(
            "t",
            class_count(kind),
            regime=regime,
            kind=kind,
            **known(regime, cells=2, adapter_width=4, bank=6),
        )
    )
    assert model.tasks["t"].kind.name == kind
    outputs = model(pixels)["t"]
    assert outputs.shape == (2, *SHAPES[kind])
    for parameter in task.parameters():
        parameter.requires_grad_(True)
    model(pixels, tasks=["t"])["t"].square().sum().backward()
    without = {name for name, p in task.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == set()
    json.dumps(task.answer(outputs[0].detach()))


@pytest.mark.parametrize("backbone", [{}, {"class_token": False, "classes": 0}, {"registers": 2}])
@pytest.mark.parametrize("regime", SHARING)
def test_all_kinds_share_a_pass_and_nobody_notices(
    regime: str, backbone: dict[str, Any], pixels: torch.Tensor
) -> None:
    kinds = [name for name in KINDS if teaches(regime, name)]
    model = MemoryViT(small_backbone(patch=4, **backbone)).eval()
    plain = model.backbone(pixels) if model.backbone.head is not None else None
    for kind in kinds:
        randomised(
            model.add_task(
                kind,
                class_count(kind),
                regime=regime,
                kind=kind,
                **known(regime, cells=2, adapter_width=4, bank=6),
            )
        )
    together, exactly = model(pixels), model(pixels, exact=True)
    if plain is not None:
        assert torch.equal(exactly["base"], plain)
        assert torch.allclose(together["base"], plain, atol=1e-5)
    for kind in kinds:
        alone = MemoryViT(model.backbone).eval()
        alone.attach(model.engram(kind))
        assert torch.equal(exactly[kind], alone(pixels, exact=True)[kind])
        assert torch.allclose(together[kind], alone(pixels)[kind], atol=1e-5)
        assert torch.allclose(together[kind], exactly[kind], atol=1e-5)


# What it answers


def test_an_answer_with_several_labels_says_which_reach_their_threshold() -> None:
    task = MemoryViT(small_backbone(patch=4)).add_task("t", ["a", "b", "c", "d"], kind="multilabel")
    task.head.fitted["thresholds"].copy_(torch.tensor([0.9, 0.5, 0.1, 0.2]))
    answer = task.answer(torch.tensor([2.0, 1.0, -1.0, -3.0]), top_k=1)
    assert [(one["class"], one["present"]) for one in answer] == [
        ("a", False), ("b", True), ("c", True),
    ]  # fmt: skip
    assert answer[0]["probability"] == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=1e-6)
    assert task.kind.words(answer) == "b 73.1%, c 26.9%"
    assert task.kind.words(task.answer(torch.full((4,), -9.0))) == "none"


def test_numbers_are_answered_in_the_units_of_the_labels() -> None:
    model = MemoryViT(small_backbone(patch=4)).eval()
    task = model.add_task("t", ["age", "height"], kind="regression")
    task.kind.prepare(task.head, np.array([[10.0, 100.0], [30.0, 100.0]]))
    output = model(torch.rand(1, 3, 16, 16))["t"][0]  # a head of zeros: the mean
    assert task.answer(output) == [{"name": "age", "value": 20.0}, {"name": "height", "value": 100}]
    assert task.head.fitted["std"].tolist() == [10.0, 1.0]  # what does not vary stays itself
    assert task.kind.words(task.answer(output)) == "age 20, height 100"
    years = np.stack([np.full(300_000, 37.3), np.arange(300_000) % 11 + 1995.0], 1)
    task.kind.prepare(task.head, years.astype(np.float32))
    assert task.head.fitted["mean"].tolist() == pytest.approx([37.3, 2000.0], rel=1e-5)
    assert task.head.fitted["std"].tolist() == pytest.approx([1.0, 10**0.5], rel=1e-4)


def test_a_mask_is_answered_as_a_picture_of_its_classes() -> None:
    task = MemoryViT(small_backbone(patch=4)).add_task(
        "t", ["sky", "sea", "land"], kind="segmentation"
    )
    classes = torch.tensor([[0, 0, 2], [0, 2, 2], [2, 2, 2]])
    output = torch.nn.functional.one_hot(classes, 3).permute(2, 0, 1).float()
    answer = task.answer(output, top_k=2)
    assert answer["classes"] == [
        {"class": "land", "share": pytest.approx(6 / 9, abs=1e-6)},
        {"class": "sky", "share": pytest.approx(3 / 9, abs=1e-6)},
    ]
    assert answer["size"] == [3, 3]
    kind, _, data = answer["mask"].partition(",")
    assert kind == "data:image/png;base64"
    png = Image.open(io.BytesIO(base64.b64decode(data)))
    assert np.asarray(png).tolist() == classes.tolist()
    assert len({png.convert("RGB").getpixel(at) for at in ((0, 0), (2, 2))}) == 2
    assert task.kind.words(answer) == "land 66.7%, sky 33.3%"


# What it learns from


def test_ignored_pixels_teach_nothing() -> None:
    task = MemoryViT(small_backbone(patch=4)).add_task("t", 3, kind="segmentation")
    outputs = torch.randn(2, 3, 4, 4, requires_grad=True)
    labels = torch.randint(0, 3, (2, 4, 4)).to(torch.uint8)
    labels[0, :2], labels[1] = IGNORED, IGNORED
    loss = task.kind.losses(outputs, labels, task.head, 0.0, None).sum()
    loss.backward()
    expected = torch.nn.functional.cross_entropy(outputs[:1, :, 2:], labels[:1, 2:].long())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert outputs.grad is not None
    assert not outputs.grad[0, :, :2].any()
    assert not outputs.grad[1].any()
    counts, losses = task.kind.keep(outputs.detach(), labels)
    assert counts[1].sum() == losses[1] == 0


def test_numbers_of_any_size_are_learned_alike() -> None:
    task = MemoryViT(small_backbone(patch=4)).add_task("t", 2, kind="regression")
    task.head.fitted["std"].copy_(torch.tensor([1.0, 1000.0]))
    small, large = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1000.0]])
    nothing = torch.zeros(1, 2)
    first, second = (task.kind.losses(x, nothing, task.head, 0.0, None) for x in (small, large))
    assert first.item() == second.item() == 0.5


def test_scores_are_probabilities_or_the_numbers_themselves() -> None:
    output = torch.tensor([2.0, -1.0, 0.5])
    assert torch.equal(KINDS["classification"].scores(output), output.softmax(0))
    assert torch.equal(KINDS["multilabel"].scores(output), output.sigmoid())
    assert torch.equal(KINDS["regression"].scores(output), output)
    assert not KINDS["regression"].ranked
    pixels = torch.rand(3, 2, 2)
    assert torch.allclose(KINDS["segmentation"].scores(pixels).sum(0), torch.ones(2, 2))


def test_versions_agree_by_the_names_of_classes_and_by_numbers() -> None:
    names, turned = ("cat", "dog"), ("dog", "cat")
    cat, dog = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])
    one = KINDS["classification"]
    assert one.agreement((cat, names, {}), (dog, turned, {})) == 1
    assert one.agreement((cat, names, {}), (dog, names, {})) == 0
    many, half = KINDS["multilabel"], {"thresholds": torch.full((2,), 0.5)}
    both, first, none = torch.tensor([1.0, 1]), torch.tensor([1.0, -1]), torch.tensor([-1.0, -1])
    assert many.agreement((both, names, half), (first, names, half)) == 0.5
    assert many.agreement((none, names, half), (none, names, half)) == 1
    assert many.agreement((none, names, half), (first, names, half)) == 0
    number = KINDS["regression"]
    ten, nine = torch.tensor([10.0, 0.0]), torch.tensor([9.0, 0.0])
    assert number.agreement((ten, names, {}), (nine, names, {})) == pytest.approx(0.95)
    assert number.agreement((ten, names, {}), (-ten, names, {})) == 0.5
    masks, mask = KINDS["segmentation"], torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8)
    assert masks.agreement((mask, names, {}), (1 - mask, turned, {})) == 1
    assert masks.agreement((mask, names, {}), (mask.T * 0, names, {})) == 0.25


# What an answer names, and how unsure it is


def test_uncertainty_is_one_where_an_answer_could_be_either_and_zero_where_it_is_sure() -> None:
    pairs = torch.tensor([[30.0, 0.0, 0.0], [5.0, 5.0, -30.0]])
    pixels = pairs[:, :, None, None].expand(2, 3, 4, 6)
    sigmoids = torch.tensor([[30.0, -30.0, 30.0], [0.0, 0.0, 0.0]])
    halves = {"thresholds": torch.full((3,), 0.5)}
    cases = {"classification": pairs, "segmentation": pixels, "multilabel": sigmoids}
    for kind, outputs in cases.items():
        found = KINDS[kind].uncertainty(outputs, halves)
        assert found is not None
        assert found.tolist() == pytest.approx([0.0, 1.0], abs=1e-4)
    low = KINDS["multilabel"].uncertainty(torch.logit(torch.full((1, 3), 0.1)), halves)
    moved = {"thresholds": torch.full((3,), 0.1)}
    at = KINDS["multilabel"].uncertainty(torch.logit(torch.full((1, 3), 0.1)), moved)
    assert low is not None
    assert at is not None
    assert (float(low), float(at)) == pytest.approx((0.2, 1.0))
    assert KINDS["regression"].uncertainty(torch.zeros(2, 3), {}) is None
    assert KINDS["classification"].uncertainty(torch.ones(2, 1), {}).tolist() == [0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_those_of_the_answer(kind: str) -> None:
    model = MemoryViT(small_backbone(patch=4)).eval()
    regime = "patchcore" if KINDS[kind].one_class else "masked"
    task = randomised(
        model.add_task("t", ["a", "b", "c"][: class_count(kind)], kind=kind, regime=regime)
    )
    for output in torch.randn(6, *SHAPES[kind]):
        labels, confidence = task.labels(output)
        answer = task.answer(output)
        if kind == "classification":
            assert labels == [answer[0]["class"]]
        elif kind == "multilabel":
            assert set(labels) == {one["class"] for one in answer if one["present"]}
        elif kind == "anomaly":
            assert labels == (["a"] if answer["anomalous"] else [])
        elif kind == "segmentation":
            assert labels == [answer["classes"][0]["class"]]
            assert task.labels(task.kind.condensed(output[None])[0])[0] == labels
        else:
            assert labels == []
        if KINDS[kind].calibrates:
            assert confidence == pytest.approx(answer[0]["probability"], abs=1e-6)
        else:
            assert confidence is None
