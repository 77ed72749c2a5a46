"""A model that is already in memory is a backbone without being there twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.backbones import (
    FAMILIES,
    ONE_SIZE,
    RECORDS,
    TIMM,
    mae,
    mae_reference,
    near,
    reference,
    timm_names,
    timm_record,
    timm_tensors,
)
from torch import Tensor, nn

import engram
from engram import EngramError, MemoryViT, ViT, from_timm, from_transformers, load_backbone
from engram.images.preprocessing import Preprocessing

Made = Callable[[str], nn.Module]


def storages(module: nn.Module) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in module.state_dict().values()}


def copied(backbone: ViT, model: nn.Module) -> list[str]:
    """The backbone's tensors that do not lie in the model's storage."""
    theirs = storages(model)
    state = backbone.state_dict()
    return [n for n, t in state.items() if t.untyped_storage().data_ptr() not in theirs]


# transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_as_the_object_of_transformers(family: str, made: Made) -> None:
    model = made(family)
    backbone = from_transformers(model)
    assert not backbone.training
    for size in ((32, 32),) if family in ONE_SIZE else ((32, 32), (24, 40)):
        pixels = torch.randn(2, 3, *size)
        tokens, answer = reference(model, pixels, native=size == (32, 32))
        near(backbone.tokens(pixels), tokens)
        if answer is not None:
            near(backbone(pixels), answer)


@pytest.mark.parametrize("family", FAMILIES)
def test_is_the_backbone_of_the_file_that_transformers_writes(
    family: str, made: Made, tmp_path: Path
) -> None:
    model = made(family)
    model.save_pretrained(tmp_path)
    ours, read = from_transformers(model), load_backbone(tmp_path)
    assert ours.fingerprint == read.fingerprint
    assert ours.config == read.config
    assert ours.preprocessing == read.preprocessing
    assert ours.labels == read.labels


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_has_to_be_joined_is_copied(family: str, made: Made) -> None:
    backbone = from_transformers(made(family))
    joined = [n for n in backbone.state_dict() if ".qkv." in n]
    if "registers" in family:
        joined.append("class_token")  # the class position is added to it
    if backbone.config.head is not None and not backbone.config.head.pool_query:
        joined.append("head.pool.kv.weight")
    if backbone.config.activation == "swiglu":
        joined += [n for n in backbone.state_dict() if ".fc1." in n]
    assert set(copied(backbone, made(family))) <= set(joined)


def test_mae_is_read_from_the_object() -> None:
    model = mae()
    pixels = torch.randn(2, 3, 32, 32)
    near(from_transformers(model).tokens(pixels), mae_reference(model, pixels))


def test_names_of_transformers_4_are_read_too(made: Made, tmp_path: Path) -> None:
    """What its objects were called is what its files still are."""
    model = made("vit-classes")
    model.save_pretrained(tmp_path)
    old = load_file(tmp_path / "model.safetensors")

    class Old(nn.Module):
        config = model.config

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
            return old

    backbone = from_transformers(Old())
    assert backbone.fingerprint == from_transformers(model).fingerprint


def test_the_model_stays_as_it_was_and_tasks_learn_beside_it() -> None:
    model = FAMILIES["vit-classes"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memory = MemoryViT(from_transformers(model))
    task = memory.add_task("flowers", classes=3, cells=2)
    assert all(p.requires_grad for p in model.parameters())  # as it was
    assert not any(p.requires_grad for p in memory.backbone.parameters())
    memory(torch.randn(2, 3, 32, 32), tasks=["flowers"])["flowers"].sum().backward()
    assert all(p.grad is not None for p in task.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_training_the_model_shows_in_the_fingerprint() -> None:
    model = FAMILIES["vit-classes"]()
    backbone = from_transformers(model)
    before = backbone.fingerprint
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 32, 32)).logits.sum().backward()
    optimiser.step()
    assert backbone.fingerprint != before


def test_half_precision_is_copied_into_fp32(made: Made) -> None:
    model = FAMILIES["vit"]().to(torch.float16)
    backbone = from_transformers(model)
    assert {p.dtype for p in backbone.parameters()} == {torch.float32}
    assert len(copied(backbone, model)) == len(backbone.state_dict())


def test_source_and_processor_are_kept(made: Made) -> None:
    model = FAMILIES["vit"]()
    assert from_transformers(model).source == "ViTModel (an object)"
    model.config.name_or_path = "google/vit-base-patch32-224-in21k"
    assert from_transformers(model).source == "google/vit-base-patch32-224-in21k"
    assert from_transformers(model, source="mine").source == "mine"
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]
    )
    preprocessing = from_transformers(model, processor=processor).preprocessing
    assert preprocessing is not None
    assert (preprocessing.mean, preprocessing.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    given = Preprocessing((16, 16), None)
    assert from_transformers(model, preprocessing=given).preprocessing == given
    assert from_transformers(model, image_size=64).preprocessing.size == (64, 64)  # type: ignore[union-attr]


def test_wrapped_models_are_unwrapped(made: Made) -> None:
    model = made("vit")
    wrapped = nn.DataParallel(torch.compile(model))  # type: ignore[arg-type]
    assert from_transformers(wrapped).fingerprint == from_transformers(model).fingerprint


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: "google/vit-base", "load_backbone"),
        (lambda: nn.Linear(2, 2), "settings were expected"),
        (
            lambda: transformers.SwinModel(
                transformers.SwinConfig(image_size=32, embed_dim=8, depths=[1], num_heads=[1])
            ),
            "'swin' model",
        ),
    ],
)
def test_what_is_no_vit_of_transformers_is_refused(model: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        from_transformers(model())


def test_a_model_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        model = FAMILIES["vit"]()
    with pytest.raises(EngramError, match="no values yet"):
        from_transformers(model)


# timm, which is not installed here


class LikeTimm(nn.Module):
    """An object with the state_dict names and attributes of timm's VisionTransformer."""

    def __init__(self, tensors: dict[str, Tensor], heads: int, **cfg: Any) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(last, nn.Parameter(tensor))
        self.get_submodule("blocks.0.attn").num_heads = heads  # type: ignore[assignment]
        self.global_pool = cfg.pop("global_pool", "token")
        self.pretrained_cfg = cfg


@pytest.mark.parametrize("family", TIMM)
def test_an_object_with_timms_names_is_read_by_family(
    family: str, made: Made, tmp_path: Path
) -> None:
    backbone = from_transformers(made(family))
    names = timm_tensors(family, backbone)
    settings = {"num_classes": 0, **TIMM[family]}
    settings |= settings.pop("pretrained_cfg", {})
    model = LikeTimm(names, 4, **settings)
    timm = from_timm(model)
    assert timm.fingerprint == backbone.fingerprint
    assert timm.config.heads == 4
    assert timm.config.activation == backbone.config.activation
    joined = [n for n in timm.state_dict() if n.endswith("qkv.bias") and backbone.config.rotary]
    if family in ("aimv2", "dinov3-gated"):
        joined += [n for n in timm.state_dict() if ".fc1." in n]
    assert set(copied(timm, model)) == set(joined)


@pytest.mark.parametrize("name", RECORDS)
def test_an_object_of_timms_eva_is_the_backbone_of_its_file(name: str, tmp_path: Path) -> None:
    """The modules of the object say what its tensors do not show."""
    record = timm_record(name)
    arguments = record.config["model_args"]
    pool = record.config["global_pool"]
    architecture = record.config["architecture"]
    model = LikeTimm(record.weights, 2, architecture=architecture, global_pool=pool)
    for module, attribute in (("attn_pool", "num_heads"), ("rope", "ref_feat_shape")):
        argument = {"attn_pool": "attn_pool_num_heads", "rope": "ref_feat_shape"}[module]
        if argument in arguments:
            if module not in model._modules:
                model.add_module(module, nn.Module())
            setattr(model.get_submodule(module), attribute, arguments[argument])
    ours, read = from_timm(model), load_backbone(record.save(tmp_path))
    assert (ours.fingerprint, ours.config) == (read.fingerprint, read.config)
    pixels, tokens, _ = record.cases[1]
    near(ours.tokens(pixels), tokens)


def test_timms_file_and_an_object_built_from_it_are_the_same_backbone(assets: Path) -> None:
    file = assets / "weights/vit_tiny_patch16_224/timm.safetensors"
    model = LikeTimm(
        load_file(file), 3, architecture="vit_tiny_patch16_224", tag="augreg_in21k_ft_in1k",
        hf_hub_id="timm/", input_size=(3, 224, 224), interpolation="bicubic", crop_pct=0.9,
        mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_mode="center", num_classes=1000,
    )  # fmt: skip
    backbone, read = from_timm(model), load_backbone(file)
    assert backbone.source == "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert backbone.fingerprint == read.fingerprint
    assert backbone.config == read.config
    assert backbone.preprocessing == read.preprocessing
    assert copied(backbone, model) == []
    pixels = load_file(file.with_name("reference.safetensors"))
    name = next(n for n in pixels if pixels[n].ndim == 4)
    with torch.no_grad():
        assert torch.equal(backbone(pixels[name][:2]), read(pixels[name][:2]))


def test_what_is_no_vit_of_timm_is_refused(made: Made) -> None:
    with pytest.raises(EngramError, match="from_transformers"):
        from_timm(made("vit"))
    names = timm_names(engram.random_backbone())
    for called in ("swin_tiny_patch4_window7_224", "vit_base_patch16_rpn_224"):
        with pytest.raises(EngramError, match="not a plain ViT"):
            from_timm(LikeTimm(names, 4, architecture=called))
    with pytest.raises(EngramError, match="lacks"):
        from_timm(nn.Linear(2, 2))
    assert from_timm(LikeTimm(names, 4)).source == "LikeTimm (an object)"
