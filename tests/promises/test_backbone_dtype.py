"""A backbone whose weights are in bf16: half the memory, and what it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.errors import refuses
from tests.support.passes import PATHS
from tests.support.strategies import FAMILY_OPTIONS, MIXED, model_of, some_pixels, tiny_backbone
from torch import Tensor, nn

from engram import EngramError, MemoryViT, load_backbone, load_model, random_backbone, save_backbone
from engram.errors import Notice
from engram.export import export_onnx
from engram.store.engram import BackboneInfo
from engram.store.format import read_engram
from engram.train.features.cache import Cache
from engram.util.processes import dtype_for


@pytest.fixture(autouse=True)
def _a_cpu_that_can() -> None:
    try:
        dtype_for("bf16", torch.device("cpu"))
    except EngramError as error:
        pytest.skip(str(error))


def rounded(model: MemoryViT) -> MemoryViT:
    model.backbone.round_weights()
    return model


def bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def test_the_weights_take_half_the_memory(tmp_path: Path) -> None:
    folder = save_backbone(random_backbone(width=128, classes=0), tmp_path)
    whole, half = load_backbone(folder), load_backbone(folder, dtype="bf16")
    assert bytes_of(half) < 0.52 * bytes_of(whole)
    assert (whole.stored, half.stored) == ("fp32", "bf16")
    assert {p.dtype for p in MemoryViT(half).add_task("t", 3).parameters()} == {torch.float32}
    with refuses("fp32 or bf16, not in 'int4'"):
        load_backbone(folder, dtype="int4")


def test_it_is_the_same_backbone_until_a_weight_changes() -> None:
    backbone = random_backbone()
    before = backbone.fingerprint
    assert backbone.round_weights().fingerprint == before
    assert MemoryViT(backbone).float().backbone.fingerprint == before  # moved and cast, not changed
    with torch.no_grad():
        backbone.layers[0].proj.weight[0, 0] += 1
    assert backbone.fingerprint != before


@pytest.mark.parametrize("family", FAMILY_OPTIONS)
def test_answers_change_a_little_on_every_path(family: str) -> None:
    options, pixels = FAMILY_OPTIONS[family], some_pixels(dtype=torch.float32)
    whole, half = model_of(MIXED, **options), rounded(model_of(MIXED, **options))
    for path in PATHS.values():
        wanted, found = path(whole, pixels), path(half, pixels)
        for name, output in found.items():
            assert output.dtype == torch.float32
            scale = wanted[name].detach().abs().mean()
            change = (output - wanted[name]).detach().abs().mean() / scale
            assert 0 < change < 0.2, (name, change)


@pytest.mark.parametrize("family", ["siglip", "dinov3"])
def test_the_promises_hold_in_bf16_too(family: str) -> None:
    half, pixels = rounded(model_of(MIXED, **FAMILY_OPTIONS[family])), some_pixels().float()
    with torch.no_grad():
        together = half(pixels, exact=True)
        assert torch.equal(together["base"], half.backbone(pixels))
        for name in half.tasks:
            assert torch.equal(half(pixels, tasks=[name], exact=True)[name], together[name])


def test_a_task_learns_in_fp32_and_the_backbone_stays() -> None:
    model = rounded(MemoryViT(tiny_backbone(torch.float32)))
    task, before = model.add_task("t", 3, cells=2), model.backbone.fingerprint
    optimiser = torch.optim.SGD(task.parameters(), lr=0.1)
    loss = model(some_pixels().float())["t"].square().sum()
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in task.parameters())
    optimiser.step()
    assert model.backbone.fingerprint == before


def test_an_engram_is_marked_and_says_so_on_another_backbone(tmp_path: Path) -> None:
    folder = save_backbone(random_backbone(), tmp_path / "vit")
    model = MemoryViT(load_backbone(folder, dtype="bf16"))
    model.add_task("t", 3, cells=2)
    path = model.save("t", tmp_path / "t.safetensors")
    written = read_engram(path)
    assert written.backbone.dtype == "bf16"
    assert "in bf16" in str(written)
    assert written.content == model.engram("t").content
    with pytest.warns(Notice, match="in bf16.*in fp32"):
        whole = load_model(path)
    assert whole.backbone.stored == "fp32"
    assert (
        load_model(path, backbone_dtype="bf16").backbone.stored == "bf16"
    )  # a warning is an error
    assert "dtype" not in whole.engram("t").header()["backbone"]  # as earlier versions wrote it
    assert BackboneInfo.from_backbone(whole.backbone).dtype == "fp32"


def test_what_needs_other_weights_is_refused(tmp_path: Path) -> None:
    model = rounded(MemoryViT(random_backbone()))
    with refuses("whose weights are in bf16"):
        model.add_task("t", 3, regime="full")
    with refuses("load it in fp32"):
        export_onnx(model, tmp_path / "a.onnx")


def test_attention_and_the_cache_work_and_are_kept_apart(tmp_path: Path) -> None:
    backbone, images = random_backbone(), torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    model = MemoryViT(backbone)
    model.add_task("t", 3, cells=2)
    before = model.attention(torch.rand(1, 3, 32, 32), "t")
    whole = Cache(backbone, model.preprocessing, keeps="all")
    rows: Tensor = whole.compute(images)
    rounded(model)
    half = Cache(backbone, model.preprocessing, keeps="all")
    assert half.folder != whole.folder
    assert not torch.equal(half.compute(images), rows)
    assert torch.allclose(half.compute(images), rows, atol=0.1)
    cached = half.features(half.compute(images))
    assert model.from_cache(cached, ["t"]).outputs()["t"].dtype == torch.float32
    assert model.attention(torch.rand(1, 3, 32, 32), "t").shape == before.shape
