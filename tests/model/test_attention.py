"""Attention maps: they add up, agree with the forward pass, and leave no trace."""

import threading
from collections.abc import Sequence

import pytest
import torch
from tests.support.regimes import SUPERVISED, known
from tests.support.strategies import FAMILY_OPTIONS, tiny_backbone
from torch import nn

import engram
from engram.errors import EngramError
from engram.methods import METHODS, LearnedPooling, Side
from engram.methods.attention_maps import SOURCES
from engram.methods.method import Batch, Cached, Features
from engram.model import MemoryViT
from engram.model.passes import task_inputs


def model_with(classes: Sequence[str], **settings: object) -> MemoryViT:
    model = MemoryViT(engram.random_backbone())
    model.add_task("t", classes, **settings)  # type: ignore[arg-type]
    return model.eval()


@pytest.mark.parametrize("regime", SUPERVISED)
def test_shares_add_up_and_agree_with_the_patches(regime: str) -> None:
    model = model_with(["a", "b"], regime=regime, **known(regime, cells=4))
    seen = model.attention_maps("t", torch.rand(3, 3, 32, 32))
    assert seen.shares.sum(1) == pytest.approx(torch.ones(len(seen.shares)), abs=1e-5)
    assert seen.weights.sum((2, 3)).mean(0) == pytest.approx(seen.shares[:, 0], abs=1e-5)
    reads_cells = ("cells" in METHODS[regime].setting_names()) and not issubclass(
        METHODS[regime], Side
    )  # those are read on the way
    assert bool((seen.shares[:, SOURCES.index("its cells")] > 0).all()) == reads_cells
    assert seen.pooled == issubclass(METHODS[regime], Side | LearnedPooling)


def test_a_contribution_is_what_a_patch_adds_along_all_that_is_added() -> None:
    model, pixels = model_with(["a", "b"], cells=0), torch.rand(1, 3, 32, 32)
    task, backbone, block = model.task("t"), model.backbone, model.backbone.layers[0]
    assert task.class_token is not None
    with torch.no_grad():
        own = backbone.place(task.class_token)[None]
        q, k, v = block.project(block.norm1(torch.cat([backbone.embed(pixels), own], 1)))
        weights = (q[:, :, -1:] @ k.mT * q.shape[-1] ** -0.5).softmax(-1)[:, :, 0]
        projection = block.proj.weight.view(backbone.config.width, block.heads, -1)
        parts = torch.einsum("bhn,bhnd,Dhd->bnD", weights, v, projection)
        added = parts.sum(1, keepdim=True) + block.proj.bias
        lengths = (parts * added).sum(2) / added.norm(dim=2)
    seen = model.attention_maps("t", pixels).contribution[0, 0].flatten()
    assert torch.allclose(seen, lengths[0, 1:-1].clamp(min=0), atol=1e-5)


@pytest.mark.parametrize("family", ["dinov3", "eva02", "pe", "aimv2"])
def test_maps_of_backbones_with_other_layers_are_what_the_layers_do(family: str) -> None:
    """Rotary positions turn keys; a norm of what was read has the spread of all that was read."""
    model = MemoryViT(tiny_backbone(torch.float32, **FAMILY_OPTIONS[family])).eval()
    task, backbone, block = (
        model.add_task("t", 2, cells=0),
        model.backbone,
        model.backbone.layers[0],
    )
    pixels, prefix = torch.rand(1, 3, 8, 12), backbone.config.prefix
    assert task.class_token is not None
    with torch.no_grad():
        x = backbone.embed(pixels)
        normed = block.norm1(torch.cat([x, backbone.place(task.class_token)[None]], 1))
        q, k, v = block.project(normed, backbone.rotation((8, 12), x.shape[1]))
        weights = (q[:, :, -1:] @ k.mT * q.shape[-1] ** -0.5).softmax(-1)[:, :, 0]
        parts = torch.einsum("bhn,bhnd->bnhd", weights, v).flatten(2)
        read = parts.sum(1, keepdim=True)
        added = block.add_up(read)
        if isinstance(block.read_norm, nn.LayerNorm):
            spread = (read.var(2, correction=0, keepdim=True) + block.read_norm.eps).sqrt()
            parts = (parts - parts.mean(2, keepdim=True)) / spread * block.read_norm.weight
        scale = 1 if block.scale1 is None else block.scale1
        parts, added = parts @ block.proj.weight.T * scale, added * scale
        lengths = (parts * added).sum(2) / added.norm(dim=2)
    seen = model.attention_maps("t", pixels)
    assert torch.allclose(seen.weights[0, 0].flatten(), weights.mean(1)[0, prefix:-1], atol=1e-5)
    wanted = lengths[0, prefix:-1].clamp(min=0)
    assert torch.allclose(seen.contribution[0, 0].flatten(), wanted, atol=1e-5)


@pytest.mark.parametrize("regime", SUPERVISED)
def test_a_patch_without_a_value_contributes_nothing_whatever_its_weight(regime: str) -> None:
    """As the corners in a ViT: many look at them, and read nothing."""
    model = model_with(["a", "b"], regime=regime, **known(regime, rank=4))
    backbone, pixels = model.backbone, torch.rand(1, 3, 32, 32)
    before = model.attention_maps("t", pixels)
    assert bool((before.contribution.sum((2, 3)) > 0).any())
    width = backbone.config.width
    task = model.task("t")
    with torch.no_grad():
        for one in (backbone, task.backbone or backbone):
            for block in one.layers:
                block.qkv.weight[2 * width :] = 0  # no token has a value
                block.qkv.bias[2 * width :] = 0
    seen = model.attention_maps("t", pixels)
    if not seen.pooled:
        assert float(seen.contribution.max()) == 0
        assert float(seen.weights.max()) > 0


def test_only_a_child_reads_what_it_extends() -> None:
    model = MemoryViT(engram.random_backbone())
    model.add_task("a", 2)
    model.add_task("b", 2, cells=0, extends=["a"])
    model.add_task("c", 2, cells=9)
    pixels = torch.rand(2, 3, 32, 32)
    extended = {name: model.attention_maps(name, pixels).shares[:, 4] for name in model.tasks}
    assert float(extended["a"].max()) == float(extended["c"].max()) == 0
    assert float(extended["b"].min()) > 0


def test_maps_are_the_attention_of_the_first_layer_by_hand() -> None:
    model = model_with(["a", "b"], cells=3)
    task, backbone, pixels = model.task("t"), model.backbone, torch.rand(2, 3, 32, 32)
    assert task.class_token is not None
    assert task.cells is not None
    block, x = backbone.layers[0], backbone.embed(pixels)
    own = backbone.place(task.class_token).expand(2, -1, -1)
    tokens = torch.cat([x, own, task.cells[0].expand(2, -1, -1)], dim=1)
    q, k, _ = block.project(block.norm1(tokens))
    scores = q[:, :, x.shape[1] : x.shape[1] + 1] @ k.mT / q.shape[-1] ** 0.5
    weights = scores.softmax(-1).mean(1)[:, 0].detach()
    seen = model.attention_maps("t", pixels)
    assert torch.allclose(seen.weights[:, 0].flatten(1), weights[:, 1 : x.shape[1]], atol=1e-6)
    assert float(seen.shares[0, 3]) == pytest.approx(float(weights[:, -3:].sum(1).mean()), abs=1e-6)


UPDATES = [("memory", "propagate"), ("memory+adapter", "add")]


@pytest.mark.parametrize(
    ("regime", "update"), [*((name, "fresh") for name in SUPERVISED), *UPDATES]
)
def test_attention_is_that_of_the_pass_that_answers(regime: str, update: str) -> None:
    model, pixels = (
        model_with(["a", "b"], regime=regime, **known(regime, update=update)),
        torch.rand(1, 3, 32, 32),
    )
    task = model.task("t")
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(torch.randn_like(parameter))
    given: list[torch.Tensor] = []
    for block in (task.backbone or model.backbone).layers:
        block.qkv.register_forward_hook(lambda module, inputs, output: given.append(inputs[0]))
    with torch.inference_mode():
        model(pixels, tasks=["t"])
    answering, given[:] = given[:], []
    model.attention_maps("t", pixels)
    for one, other in zip(given, answering, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_an_untrained_class_token_attends_as_the_backbones_own() -> None:
    pixels = torch.rand(2, 3, 32, 32)
    model = model_with(["a", "b"], regime="class")
    task, base = model.attention_maps("t", pixels), model.attention_maps("base", pixels)
    assert torch.allclose(task.weights, base.weights, atol=1e-6)


def test_without_a_class_token_there_is_no_map() -> None:
    model = MemoryViT(engram.random_backbone(class_token=False, prefix_positions=0, classes=0))
    model.add_task("t", 2, regime="head")
    with pytest.raises(EngramError, match="no attention to show"):
        model.attention_maps("t", torch.rand(1, 3, 32, 32))


@pytest.mark.parametrize("class_token", [True, False])
def test_the_map_of_side_patches_is_what_the_head_is_given(class_token: bool) -> None:
    """The rows that the map weighs are what the queries pool, on a backbone without tokens too."""
    prefix = {} if class_token else {"class_token": False, "prefix_positions": 0}
    model = MemoryViT(engram.random_backbone(classes=0, **prefix))
    model.add_task("a", 2, regime="side", rank=4)
    task = model.add_task("b", 2, regime="side", rank=4, extends=["a"], seed=1)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(torch.randn_like(parameter))
        task.side.queries[:] = task.side.queries[0]  # so that their mean is each of them
    pixels, backbone = torch.rand(2, 3, 32, 32), model.backbone
    seen = model.attention_maps("b", pixels)
    assert seen.weights.shape == (2, 1, *(side // backbone.config.patch for side in (32, 32)))
    batch = Batch(backbone, (32, 32), pixels.device)
    climb = Side.join(task_inputs(model, ["b"]), backbone)(batch)
    with torch.no_grad():
        raw = backbone.encode(backbone.embed(pixels), pixels.shape[-2:], climb.layer)
        final = backbone.norm(raw)
        climb.layer(backbone.config.depth, final)
        patches = climb.vectors("b")[:, backbone.config.prefix :]
        read = torch.einsum("bp,bpr->br", seen.weights.flatten(1), patches)
        if class_token:
            share = 1 - seen.weights.sum((2, 3))
            read = read + share * climb.vectors("b")[:, 0]
        pooled = read.repeat(1, 8)
        pooled = torch.nn.functional.layer_norm(pooled, pooled.shape[-1:])
        width = backbone.config.width
        own = climb.head_inputs(Features(batch, Cached(final=final)))["b"].own[:, width:]
    assert torch.allclose(pooled, own[:, : pooled.shape[1]], atol=1e-4)


def test_masks_of_side_patches_show_the_attention_of_the_backbone() -> None:
    """Every row answers for its own patch, so nothing is pooled."""
    model, pixels = (
        model_with(["a", "b"], regime="side", kind="segmentation"),
        torch.rand(1, 3, 32, 32),
    )
    seen, base = model.attention_maps("t", pixels), model.attention_maps("base", pixels)
    assert not seen.pooled
    assert torch.equal(seen.weights, base.weights)


def test_the_model_gives_either_map_by_name() -> None:
    model, pixels = model_with(["a", "b"]), torch.rand(2, 3, 32, 24)
    seen = model.attention_maps("t", pixels)
    assert torch.equal(model.attention(pixels, "t"), seen.contribution)
    assert torch.equal(model.attention(pixels, "t", method="weights"), seen.weights)
    depth, patch = model.backbone.config.depth, model.backbone.config.patch
    assert model.attention(pixels, "base").shape == (2, depth, 32 // patch, 24 // patch)
    with pytest.raises(EngramError, match="choose contribution or weights"):
        model.attention(pixels, "t", method="rollout")


def test_maps_leave_no_trace() -> None:
    model = model_with(["a", "b"])
    pixels = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        before = model(pixels)
        model.attention_maps("t", pixels)
        model.attention_maps("base", pixels)
        after = model(pixels)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_maps_do_not_see_other_models_on_the_same_backbone() -> None:
    model, pixels = model_with(["a", "b"]), torch.rand(1, 3, 32, 32)
    alone = model.attention_maps("base", pixels)
    other, done = MemoryViT(model.backbone), threading.Event()
    other.add_task("other", 2)

    def run() -> None:  # another number of images, as when a task is tried before it is attached
        while not done.is_set():
            with torch.inference_mode():
                other(torch.rand(3, 3, 32, 32))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(100):
            seen = model.attention_maps("base", pixels)
            assert torch.allclose(seen.weights, alone.weights, atol=1e-6)
    finally:
        done.set()
        thread.join()
