"""Everybody's weights: each layout against the library that writes it, and every bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import engram
from engram import EngramError, ViT, load_trunk, random_trunk, save_trunk
from engram.images.preprocessing import Preprocessing
from engram.trunks import load as checkpoints
from engram.util import hub
from engram.vit import HeadConfig

SIZE = {"image_size": 32, "patch_size": 8}
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SIZE}
VIT = {**COMMON, "intermediate_size": 48}
DINO = {**COMMON, "mlp_ratio": 2}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 99,
}


def randomised(model: nn.Module) -> nn.Module:
    """No zeros and ones for a mistake to hide behind."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            one = parameter.ndim == 1 and not name.endswith(("bias", "class_embedding"))
            parameter.copy_(float(one) + 0.2 * noise)
    return model.eval()


def forms(**kwargs: Any) -> dict[str, Any]:
    return {"text_config": TEXT, "vision_config": {**VIT, **kwargs}}


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**VIT)),
    "vit-no-pooler": lambda: transformers.ViTModel(
        transformers.ViTConfig(**VIT, qkv_bias=False, layer_norm_eps=1e-6),
        add_pooling_layer=False,
    ),
    "vit-classes": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**VIT, num_labels=5)
    ),
    "vit-masked": lambda: transformers.ViTForMaskedImageModeling(
        transformers.ViTConfig(**VIT, encoder_stride=8)
    ),
    "deit": lambda: transformers.DeiTModel(transformers.DeiTConfig(**VIT)),
    "deit-classes": lambda: transformers.DeiTForImageClassification(
        transformers.DeiTConfig(**VIT, num_labels=5)
    ),
    "deit-teacher": lambda: transformers.DeiTForImageClassificationWithTeacher(
        transformers.DeiTConfig(**VIT, num_labels=5)
    ),
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**DINO)),
    "dinov2-classes": lambda: transformers.Dinov2ForImageClassification(
        transformers.Dinov2Config(**DINO, num_labels=5)
    ),
    "dinov2-swiglu": lambda: transformers.Dinov2ForImageClassification(
        transformers.Dinov2Config(**DINO, num_labels=5, use_swiglu_ffn=True)
    ),
    "dinov2-registers": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**DINO)
    ),
    "dinov2-registers-classes": lambda: transformers.Dinov2WithRegistersForImageClassification(
        transformers.Dinov2WithRegistersConfig(**DINO, num_labels=5, use_swiglu_ffn=True)
    ),
    "clip-vision": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VIT)),
    "clip-gelu": lambda: transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(**VIT, hidden_act="gelu")
    ),
    "clip-projection": lambda: transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(**VIT, projection_dim=7)
    ),
    "clip-full": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(**forms(), projection_dim=7)
    ),
    "clip-classes": lambda: transformers.CLIPForImageClassification(
        transformers.CLIPConfig(**forms(), num_labels=5)
    ),
    "siglip-vision": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VIT)),
    "siglip-no-head": lambda: transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**VIT, vision_use_head=False)
    ),
    "siglip-full": lambda: transformers.SiglipModel(transformers.SiglipConfig(**forms())),
    "siglip-classes": lambda: transformers.SiglipForImageClassification(
        transformers.SiglipConfig(**forms(), num_labels=5)
    ),
}


def tower(model: nn.Module) -> nn.Module:
    """The part of a model of transformers that is the ViT."""
    for name in ("vit", "deit", "dinov2", "dinov2_with_registers", "vision_model"):
        if isinstance(getattr(model, name, None), nn.Module):
            return getattr(model, name)
    return model


def reference(model: nn.Module, pixels: Tensor, native: bool) -> tuple[Tensor, Tensor | None]:
    """What transformers computes: the last normed tokens, and the answer if there is a head."""
    resize: dict[str, Any] = {} if native else {"interpolate_pos_encoding": True}
    if "Dinov2" in type(model).__name__:
        resize = {}  # always does
    with torch.no_grad():
        out = tower(model)(pixels, **resize)
        tokens = out.last_hidden_state
        if "CLIP" in type(model).__name__:
            tokens = tower(model).post_layernorm(tokens)
        if isinstance(model, transformers.CLIPModel | transformers.SiglipModel):
            return tokens, model.get_image_features(pixels, **resize).pooler_output
        if isinstance(model, transformers.SiglipVisionModel):
            return tokens, out.pooler_output
        if "ForImageClassification" in type(model).__name__:
            return tokens, model(pixels, **resize).logits
        if "WithProjection" in type(model).__name__:
            return tokens, model(pixels, **resize).image_embeds
    return tokens, None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[nn.Module, Path]]:
    """Each family's random model and the folder that transformers wrote it into."""
    made: dict[str, tuple[nn.Module, Path]] = {}

    def get(family: str) -> tuple[nn.Module, Path]:
        if family not in made:
            torch.manual_seed(0)
            model = randomised(FAMILIES[family]())
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            made[family] = model, folder
        return made[family]

    return get


Saved = Callable[[str], tuple[nn.Module, Path]]


def near(ours: Tensor, theirs: Tensor, within: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= within


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers(family: str, saved: Saved) -> None:
    model, folder = saved(family)
    trunk = load_trunk(folder)
    assert not trunk.training
    assert not any(p.requires_grad for p in trunk.parameters())
    assert trunk.source == str(folder)
    for size in ((32, 32), (48, 48), (24, 40), (16, 64)):
        pixels = torch.randn(2, 3, *size)
        tokens, answer = reference(model, pixels, native=size == (32, 32))
        near(trunk.tokens(pixels), tokens)
        if answer is not None:
            near(trunk(pixels), answer)
        else:
            assert trunk.head is None


def test_agrees_with_the_encoder_of_mae(tmp_path: Path) -> None:
    config = transformers.ViTMAEConfig(**VIT, mask_ratio=0.0, decoder_hidden_size=16,
                                       decoder_num_attention_heads=2, decoder_num_hidden_layers=1,
                                       decoder_intermediate_size=16)  # fmt: skip
    model = randomised(transformers.ViTMAEForPreTraining(config))
    model.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        kept_order = torch.arange(16.0).expand(2, -1)
        tokens = model.vit(pixels, noise=kept_order).last_hidden_state
    near(load_trunk(tmp_path).tokens(pixels), tokens)


@pytest.mark.parametrize("family", ["vit-classes", "clip-full", "dinov2-swiglu"])
def test_shards_are_one_model(family: str, saved: Saved, tmp_path: Path) -> None:
    model, folder = saved(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert load_trunk(tmp_path).fingerprint == load_trunk(folder).fingerprint
    shard = next(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(EngramError, match=shard.name):
        load_trunk(tmp_path)


def test_a_prefixed_tower_is_the_same_trunk(saved: Saved, tmp_path: Path) -> None:
    """Files of older versions of transformers call their tensors vision_model.…"""
    for family in ("clip-vision", "siglip-vision"):
        _, folder = saved(family)
        tensors = load_file(folder / "model.safetensors")
        tensors = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
        tensors["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        assert load_trunk(tmp_path).fingerprint == load_trunk(folder).fingerprint


# timm's names, written here from ours: another hand than the tables'


def timm_names(trunk: ViT) -> dict[str, Tensor]:
    out = {}
    for name, tensor in trunk.state_dict().items():
        renamed = name
        for ours, theirs in (
            ("patch.", "patch_embed.proj."),
            (".qkv.", ".attn.qkv."),
            (".scale1", ".ls1.gamma"),
            (".scale2", ".ls2.gamma"),
            ("head.pool.probe", "attn_pool.latent"),
            ("head.pool.", "attn_pool."),
            ("head.norm.", "fc_norm."),
            ("head.linear.", "head."),
            ("head.distilled.", "head_dist."),
            ("pre_norm.", "norm_pre."),
        ):
            renamed = renamed.replace(ours, theirs)
        if name.startswith("blocks."):
            renamed = renamed.replace(".proj.", ".attn.proj.")
        out[renamed] = tensor.detach().clone()
    if "class_token" in out:
        out["cls_token"] = out.pop("class_token")[None]
    if "registers" in out:
        distilled = trunk.config.prefix_positions == 2
        out["dist_token" if distilled else "reg_token"] = out.pop("registers")[None]
    position = [out.pop("prefix_position")] if "prefix_position" in out else []
    out["pos_embed"] = torch.cat([*position, out.pop("position")])[None]
    return out


TIMM = {
    "vit-classes": {"architecture": "vit_base_patch16_224"},
    "vit-no-pooler": {"architecture": "vit_base_patch16_224_miil"},
    "deit-teacher": {"architecture": "deit_tiny_distilled_patch16_224"},
    "dinov2": {"architecture": "vit_small_patch14_dinov2"},
    "dinov2-swiglu": {"architecture": "vit_giant_patch14_dinov2"},
    "dinov2-registers": {"architecture": "vit_small_patch14_reg4_dinov2"},
    "clip-vision": {"architecture": "vit_base_patch32_clip_quickgelu_224"},
    "clip-projection": {
        "architecture": "vit_base_patch32_clip_224",
        "pretrained_cfg": {"tag": "openai"},
    },
    "clip-gelu": {"architecture": "vit_base_patch32_clip_224"},
    "siglip-vision": {"architecture": "vit_base_patch16_siglip_224", "global_pool": "map"},
    "siglip-no-head": {"architecture": "vit_base_patch16_siglip_gap_224", "global_pool": "avg"},
}


@pytest.mark.parametrize("family", TIMM)
def test_timm_and_transformers_are_the_same_trunk(
    family: str, saved: Saved, tmp_path: Path
) -> None:
    _, folder = saved(family)
    config = json.loads((folder / "config.json").read_text())
    config["layer_norm_eps"] = 1e-5 if "clip" in family else 1e-6
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    trunk = load_trunk(tmp_path / "theirs")

    names = timm_names(trunk)
    if family == "clip-projection":
        names["head.bias"] = torch.zeros(len(names["head.weight"]))
    if family == "dinov2-swiglu":  # timm has none with a head over class and mean
        names = {name: tensor for name, tensor in names.items() if not name.startswith("head.")}
    save_file(names, tmp_path / "model.safetensors")
    settings = {"num_classes": 0, "model_args": {"num_heads": 4}, **TIMM[family]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    timm = load_trunk(tmp_path)

    assert timm.fingerprint == trunk.fingerprint
    assert timm.config.antialias
    assert timm.config == replace(trunk.config, antialias=True, head=timm.config.head)
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.equal(timm.tokens(pixels), trunk.tokens(pixels))
    if timm.head is not None:
        near(timm(pixels), trunk(pixels))
    else:
        assert trunk.head is None or family == "dinov2-swiglu"

    bare = tmp_path / "some_name.safetensors"
    (tmp_path / "model.safetensors").rename(bare)
    activation = "quick_gelu" if "quick" in trunk.config.activation else None
    if family == "siglip-no-head":
        activation = "gelu_tanh"  # nothing in the tensors shows it
    alone = load_trunk(bare, heads=4, activation=activation)
    assert alone.fingerprint == trunk.fingerprint
    assert alone.config == timm.config


def test_timm_pools_the_mean_behind_a_norm(tmp_path: Path) -> None:
    """timm's fc_norm: no final norm, the mean of the patches, a norm, the classifier."""
    head = HeadConfig(classes=5, pooling="mean", norm=True)
    trunk = randomised(random_trunk(final_norm=False, head=head, prefix_positions=0))
    save_file(timm_names(trunk), tmp_path / "a.safetensors")
    read = load_trunk(tmp_path / "a.safetensors", heads=4)
    pixels = torch.randn(2, 3, 32, 32)
    assert read.config == trunk.config
    assert torch.equal(read(pixels), trunk(pixels))


def test_architecture_is_inferred_from_bare_tensors(tmp_path: Path) -> None:
    trunk = random_trunk(image_size=42, patch=14, width=192, depth=2, heads=3, mlp_width=100)
    save_file(timm_names(trunk), tmp_path / "a.safetensors")
    assert load_trunk(tmp_path / "a.safetensors").config == trunk.config
    for width, heads in {32: 1, 384: 6, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 16}.items():
        assert checkpoints._heads(width, swiglu=False) == heads
    assert checkpoints._heads(1536, swiglu=True) == 24


def test_images_that_are_not_square(tmp_path: Path) -> None:
    trunk = random_trunk(image_size=32, patch=8)
    save_file(
        {**timm_names(trunk), "pos_embed": torch.randn(1, 1 + 2 * 6, 64)},
        tmp_path / "model.safetensors",
    )
    settings = {"architecture": "vit_tiny", "pretrained_cfg": {"input_size": [3, 16, 48]}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    read = load_trunk(tmp_path)
    assert read.config.image_size == (16, 48)
    assert read.preprocessing is not None
    assert read.preprocessing.size == (16, 48)
    (tmp_path / "config.json").unlink()
    with pytest.raises(EngramError, match="13 position embeddings"):
        load_trunk(tmp_path / "model.safetensors")


# Google's names


def google_names(trunk: ViT) -> dict[str, np.ndarray[Any, Any]]:
    heads, width = trunk.config.heads, trunk.config.width
    state = {name: tensor.numpy() for name, tensor in trunk.state_dict().items()}
    block = "Transformer/encoderblock_"
    position = np.concatenate([state["prefix_position"], state["position"]])[None]
    out = {
        "embedding/kernel": state["patch.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch.bias"],
        "cls": state["class_token"][None],
        "Transformer/posembed_input/pos_embedding": position,
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
    }
    for i in range(trunk.config.depth):
        ours = f"blocks.{i}."
        attention = f"{block}{i}/MultiHeadDotProductAttention_1/"
        for part, name in enumerate(("query", "key", "value")):
            rows = slice(part * width, (part + 1) * width)
            kernel = state[ours + "qkv.weight"][rows].T.reshape(width, heads, -1)
            out[f"{attention}{name}/kernel"] = kernel
            out[f"{attention}{name}/bias"] = state[ours + "qkv.bias"][rows].reshape(heads, -1)
        out[attention + "out/kernel"] = state[ours + "proj.weight"].T.reshape(heads, -1, width)
        out[attention + "out/bias"] = state[ours + "proj.bias"]
        for number, name in ((0, "norm1"), (2, "norm2")):
            out[f"{block}{i}/LayerNorm_{number}/scale"] = state[f"{ours}{name}.weight"]
            out[f"{block}{i}/LayerNorm_{number}/bias"] = state[f"{ours}{name}.bias"]
        for number, name in ((0, "mlp.fc1"), (1, "mlp.fc2")):
            dense = f"{block}{i}/MlpBlock_3/Dense_{number}/"
            out[dense + "kernel"] = state[f"{ours}{name}.weight"].T
            out[dense + "bias"] = state[f"{ours}{name}.bias"]
    for ours, name in (("head.hidden", "pre_logits"), ("head.linear", "head")):
        if f"{ours}.weight" in state:
            out[f"{name}/kernel"] = state[f"{ours}.weight"].T
            out[f"{name}/bias"] = state[f"{ours}.bias"]
    return out


@pytest.mark.parametrize("hidden", [False, True])
def test_googles_npz_is_the_same_trunk(hidden: bool, tmp_path: Path) -> None:
    trunk = randomised(random_trunk(heads=8, head=HeadConfig(classes=5, hidden=hidden)))
    np.savez(tmp_path / "a.npz", **google_names(trunk))
    read = load_trunk(tmp_path / "a.npz")
    assert read.config == trunk.config  # the heads are in the shapes
    assert read.fingerprint == trunk.fingerprint
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.equal(read(pixels), trunk(pixels))
    assert read.preprocessing == Preprocessing((32, 32), None, "bilinear")
    whole = (tmp_path / "a.npz").read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.npz").write_bytes(whole[:length])
        with pytest.raises(EngramError, match="damaged"):
            load_trunk(tmp_path / "a.npz")
    for at in range(30, len(whole) - 5000, 5003):  # the archive has checksums
        (tmp_path / "a.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(EngramError):
            load_trunk(tmp_path / "a.npz")


def test_a_missing_part_of_googles_is_named(tmp_path: Path) -> None:
    names = google_names(random_trunk())
    query = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/bias"
    del names[query], names["Transformer/encoderblock_2/LayerNorm_0/scale"]
    np.savez(tmp_path / "a.npz", **names)
    with pytest.raises(EngramError) as error:
        load_trunk(tmp_path / "a.npz")
    assert query in str(error.value)
    assert "Transformer/encoderblock_2/LayerNorm_0/scale" in str(error.value)


# Our own layout


def test_our_own_layout_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = randomised(random_trunk(layer_scale=True, classes=3))
    trunk.preprocessing = Preprocessing((32, 48), None, "bilinear", (0.1, 0.2, 0.3))
    trunk.labels = ("a", "b", "c")
    save_trunk(trunk, tmp_path / "pico")
    read = load_trunk(tmp_path / "pico")
    assert read.fingerprint == trunk.fingerprint
    assert (read.config, read.labels) == (trunk.config, trunk.labels)
    assert read.preprocessing == trunk.preprocessing
    assert sorted(p.name for p in (tmp_path / "pico").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    monkeypatch.setattr(checkpoints, "BUNDLED", tmp_path)
    assert load_trunk("pico").fingerprint == trunk.fingerprint
    assert load_trunk("pico").source == "pico"

    save_trunk(trunk, tmp_path / "half", dtype=torch.float16)
    half = load_trunk(tmp_path / "half")
    assert half.norm.weight.dtype == torch.float32
    near(half.tokens(torch.ones(1, 3, 32, 32)), trunk.tokens(torch.ones(1, 3, 32, 32)), 0.05)
    small, large = (tmp_path / n / "model.safetensors" for n in ("half", "pico"))
    assert small.stat().st_size < 0.6 * large.stat().st_size


def test_pico_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoints, "BUNDLED", tmp_path)
    with pytest.raises(EngramError, match="bundled trunk 'pico'"):
        load_trunk("pico")


@pytest.mark.parametrize(
    "change",
    [
        {"engram_trunk": 2},
        {"config": None},
        {"config": {}},
        {"depth": 3},
        {"depth": 10**12},
        {"depth": "4"},
        {"heads": 0},
        {"heads": 7},
        {"activation": "relu"},
        {"image_size": 32},
        {"image_size": [64, 64]},
        {"head": {"classes": 10, "pooling": "best"}},
        {"surprise": 1},
        {"preprocessing": {"size": [0, 0]}},
        {"preprocessing": {"surprise": 1}},
    ],
)
def test_our_own_layout_damaged(change: dict[str, Any], tmp_path: Path) -> None:
    save_trunk(random_trunk(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in change.items():
        (config if key in config else config["config"])[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngramError):
        load_trunk(tmp_path)


# Preprocessing, sizes, labels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small transformers folder that a test may change."""
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, num_labels=3))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def update(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


SQUASH = {"size": {"height": 32, "width": 48}, "resample": 2}
CROP = {
    "size": {"shortest_edge": 36},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "resample": 3,
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Preprocessing((32, 32), None, "bilinear")),
        (SQUASH, Preprocessing((32, 48), None, "bilinear")),
        (CROP, Preprocessing((32, 32), 36, "bicubic")),
        ({"size": 32, "resample": 1}, Preprocessing((32, 32), None, "lanczos")),
        (
            {"size": 40, "crop_size": 32, "do_center_crop": True, "resample": 3},
            Preprocessing((32, 32), 40, "bicubic"),
        ),
        ({"size": {"shortest_edge": 32}}, Preprocessing((32, 32), 32, "bilinear")),
        ({**CROP, "do_center_crop": False}, Preprocessing((32, 32), 32, "bicubic")),
        (
            {"size": {"height": 40, "width": 40}, "crop_size": 32, "do_center_crop": True},
            Preprocessing((32, 32), 40, "bilinear"),
        ),
        (
            {"size": 32, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]},
            Preprocessing((32, 32), None, "bilinear", (0.1, 0.2, 0.3), (1, 2, 3)),
        ),
        (
            {"size": 32, "do_normalize": False},
            Preprocessing((32, 32), None, "bilinear", (0, 0, 0), (1, 1, 1)),
        ),
        ({"size": 37}, Preprocessing((32, 32), None, "bilinear")),  # 37 is no multiple of 8
    ],
)
def test_preprocessing_comes_with_the_weights(
    settings: dict[str, Any], expected: Preprocessing, folder: Path
) -> None:
    if settings:
        update(folder / "preprocessor_config.json", **settings)
    assert load_trunk(folder).preprocessing == expected
    if settings:
        (folder / "preprocessor_config.json").unlink()
        update(folder / "processor_config.json", image_processor=settings)
        assert load_trunk(folder).preprocessing == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Preprocessing((32, 32), 35)),
        ({"input_size": [3, 32, 32], "crop_pct": 0.8}, Preprocessing((32, 32), 40)),
        ({"crop_pct": 1.0, "interpolation": "bilinear"}, Preprocessing((32, 32), 32, "bilinear")),
        ({"crop_mode": "squash", "crop_pct": 1.0}, Preprocessing((32, 32), None)),
        (
            {"input_size": [3, 48, 48], "mean": [0, 0, 0], "std": [1, 1, 1]},
            Preprocessing((48, 48), 52, "bicubic", (0, 0, 0), (1, 1, 1)),
        ),
    ],
)
def test_preprocessing_of_timm(
    settings: dict[str, Any], expected: Preprocessing, tmp_path: Path
) -> None:
    save_file(timm_names(random_trunk()), tmp_path / "model.safetensors")
    config = {"architecture": "vit_tiny", "pretrained_cfg": settings, "label_names": list("abc")}
    for form in (config, {**config, **settings, "pretrained_cfg": None}):  # older repositories
        (tmp_path / "config.json").write_text(json.dumps(form))
        trunk = load_trunk(tmp_path)
        assert trunk.preprocessing == expected
        assert trunk.labels is None  # three names for ten classes
    config["label_names"] = [f"class {i}" for i in range(10)]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_trunk(tmp_path).labels == tuple(f"class {i}" for i in range(10))


def test_sizes_and_preprocessing_can_be_overridden(folder: Path) -> None:
    update(folder / "preprocessor_config.json", **CROP)
    native = load_trunk(folder)
    larger = load_trunk(folder, image_size=64)
    assert larger.preprocessing is not None
    assert (larger.preprocessing.size, larger.preprocessing.resize) == ((64, 64), 72)
    assert larger.fingerprint == native.fingerprint
    assert larger.config.image_size == (32, 32)
    assert larger.tokens(torch.randn(1, 3, 64, 64)).shape == (1, 65, 32)
    wide = load_trunk(folder, image_size=(16, 40)).preprocessing
    assert wide is not None
    assert wide.size == (16, 40)
    mine = Preprocessing((24, 24), None, "nearest")
    assert load_trunk(folder, preprocessing=mine).preprocessing == mine
    for options in ({"image_size": 33}, {"image_size": (32, 0)},
                    {"preprocessing": Preprocessing((33, 32), None)}):  # fmt: skip
        with pytest.raises(EngramError, match="multiples of its patch size 8"):
            load_trunk(folder, **options)  # type: ignore[arg-type]
    update(folder / "preprocessor_config.json", do_rescale=False)
    with pytest.raises(EngramError, match="give `preprocessing`"):
        load_trunk(folder)
    assert load_trunk(folder, preprocessing=mine).preprocessing == mine


def test_antialias_can_be_chosen(folder: Path) -> None:
    pixels = torch.randn(1, 3, 16, 16)
    plain, chosen = load_trunk(folder), load_trunk(folder, antialias=True)
    assert not plain.config.antialias
    assert (plain.tokens(pixels) - chosen.tokens(pixels)).abs().max() > 1e-3


def test_labels(folder: Path) -> None:
    assert load_trunk(folder).labels is None
    update(folder / "config.json", id2label={"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"})
    assert load_trunk(folder).labels is None
    update(folder / "config.json", id2label={"2": "c", "0": "a", "1": "b"})
    assert load_trunk(folder).labels == ("a", "b", "c")


# Bad input: one sentence each


def sentence(source: object, **options: Any) -> str:
    with pytest.raises(EngramError) as error:
        load_trunk(source, **options)  # type: ignore[arg-type]
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_paths_that_are_no_model(tmp_path: Path, folder: Path) -> None:
    assert "no file or folder" in sentence(tmp_path / "nothing")
    assert "no file or folder" in sentence(str(tmp_path / "nothing"))
    assert "no file or folder" in sentence("nothing")
    assert "no file" in sentence("models/nothing.safetensors")
    assert "config.json" in sentence(tmp_path)
    (tmp_path / "text.txt").write_text("hello")
    assert "neither" in sentence(tmp_path / "text.txt")
    for name in ("a.pt", "a.pth", "pytorch_model.bin", "a.ckpt", "a.pkl"):
        assert "can run code" in sentence(tmp_path / name)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert "no model.safetensors" in sentence(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    assert "only pickles" in sentence(folder)
    assert "give the folder" in sentence(folder / "other.safetensors")
    for bad in ("", "{", "[]", "\xff", "{}"):
        (folder / "config.json").write_text(bad, "latin-1")
        assert "config.json" in sentence(folder)


@pytest.mark.parametrize("kind", ["swin", "convnext", "beit", "resnet", "timm_swin"])
def test_models_that_are_no_plain_vit_by_name(kind: str, folder: Path) -> None:
    update(folder / "config.json", model_type=kind)
    assert f"'{kind}'" in sentence(folder)


@pytest.mark.parametrize(
    "kind", ["swin_tiny_patch4_window7_224", "convnext_tiny", "beit_base_patch16_224", "eva02_base",
             "vit_base_patch16_rpn_224", "vit_base_resnet50_384", "vit_relpos_base_patch16_224"]
)  # fmt: skip
def test_timm_models_that_are_no_plain_vit_by_name(kind: str, tmp_path: Path) -> None:
    save_file(timm_names(random_trunk()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": kind}))
    assert f"'{kind}'" in sentence(tmp_path)


def test_models_that_are_no_plain_vit_by_their_tensors(tmp_path: Path) -> None:
    swin = {
        "patch_embed.proj.weight": torch.randn(8, 3, 4, 4),
        "patch_embed.proj.bias": torch.randn(8),
        "layers.0.blocks.0.attn.qkv.weight": torch.randn(24, 8),
        "layers.0.blocks.0.attn.relative_position_bias_table": torch.randn(169, 2),
    }
    convnext = {
        "stem.0.weight": torch.randn(8, 3, 4, 4),
        "stages.0.blocks.0.conv_dw.weight": torch.randn(8, 1, 7, 7),
    }
    beit = timm_names(random_trunk())
    del beit["pos_embed"]
    beit["blocks.0.attn.relative_position_bias_table"] = torch.randn(9, 4)
    for tensors in (swin, convnext, beit):
        save_file(tensors, tmp_path / "a.safetensors")
        text = sentence(tmp_path / "a.safetensors")
        assert "no plain ViT" in text
        assert "pos_embed" in text
    save_file({}, tmp_path / "a.safetensors")
    assert "no plain ViT" in sentence(tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", weights=np.zeros(3))
    assert "no plain ViT" in sentence(tmp_path / "a.npz")


def test_every_missing_tensor_is_named(tmp_path: Path, saved: Saved) -> None:
    """Whichever tensor of whichever family is gone: nothing loads, and its name is told."""
    for family in ("vit-classes", "deit-teacher", "dinov2-registers", "clip-full", "siglip-vision"):
        _, folder = saved(family)
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        for name in tensors:
            if name.startswith(("text", "logit", "visual_projection")) or "mask_token" in name:
                continue  # not needed; without its projection a CLIP has no head
            rest = {other: tensor for other, tensor in tensors.items() if other != name}
            save_file(rest, tmp_path / "model.safetensors")
            bare = name.removeprefix("vit.").removeprefix("deit.").removeprefix("vision_model.")
            assert bare.replace("in_proj_", "q.") in sentence(tmp_path), (family, name)
    tensors = timm_names(random_trunk())
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(rest, tmp_path / "a.safetensors")
        text = sentence(tmp_path / "a.safetensors")
        # Without the token a file may be of a ViT that has none, were there not its position.
        assert name in text or (name == "cls_token" and "17 position embeddings" in text)


def test_surplus_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    tensors = timm_names(random_trunk())
    file = tmp_path / "a.safetensors"
    save_file({**tensors, "blocks.1.attn.q_norm.weight": torch.ones(4)}, file)
    assert "blocks.1.attn.q_norm.weight" in sentence(file)
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            save_file({**tensors, name: tensor.new_zeros(3)}, file)
            assert name in sentence(file, heads=4)
    for name in ("blocks.1.attn.qkv.weight", "blocks.0.mlp.fc1.weight", "head.weight"):
        for shape in ((7, 9), (3,), (0, 64), ()):
            save_file({**tensors, name: torch.zeros(shape)}, file)
            assert any(part in sentence(file, heads=4) for part in (name, "blocks.0", "head"))
    for shape in ((64, 1, 8, 8), (64, 3, 8, 4), (64, 3, 64), (0, 3, 8, 8)):
        save_file({**tensors, "patch_embed.proj.weight": torch.zeros(shape)}, file)
        assert "patch" in sentence(file, heads=4)
    for name in ("pos_embed", "cls_token"):
        for shape in ((), (0, 64), (1, 99, 64), (1, 1, 3)):
            save_file({**tensors, name: torch.zeros(shape)}, file)
            sentence(file, heads=4)
    save_file({**tensors, "norm.weight": torch.ones(64, dtype=torch.int32)}, file)
    assert "quantised" in sentence(file)


def test_a_config_that_does_not_fit_its_tensors(folder: Path) -> None:
    for key, value in {
        "hidden_size": 64, "num_hidden_layers": 3, "patch_size": 16, "intermediate_size": 50,
        "image_size": 64, "num_attention_heads": 5, "hidden_act": "relu",
    }.items():  # fmt: skip
        before = (folder / "config.json").read_text()
        update(folder / "config.json", **{key: value})
        sentence(folder)
        for nonsense in ("x", None, [], -1, {}):
            update(folder / "config.json", **{key: nonsense})
            sentence(folder)
        (folder / "config.json").write_text(before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none(value: float, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "vit.encoder.layer.1.attention.attention.key.weight"
    tensors[name][3, 4] = value
    save_file(tensors, folder / "model.safetensors")
    assert name in sentence(folder)


def test_half_precision_is_read_as_fp32(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for dtype in (torch.float16, torch.bfloat16):
        save_file({n: t.to(dtype) for n, t in tensors.items()}, folder / "model.safetensors")
        trunk = load_trunk(folder)
        assert {p.dtype for p in trunk.parameters()} == {torch.float32}


def test_truncated_files(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(timm_names(random_trunk(width=16, depth=1, heads=2)), file)
    whole = file.read_bytes()
    for length in [*range(0, 64, 7), *range(64, len(whole), len(whole) // 50), len(whole) - 1]:
        file.write_bytes(whole[:length])
        assert "safetensors" in sentence(file)
    file.write_bytes(whole + b"\0")
    assert "safetensors" in sentence(file)


def test_flipped_bits_in_the_header(tmp_path: Path) -> None:
    """Each is refused, or changes nothing but a remark: never another trunk in silence."""
    file = tmp_path / "a.safetensors"
    save_file(timm_names(random_trunk(width=16, depth=1, heads=2)), file, {"format": "pt"})
    whole = file.read_bytes()
    fingerprint = load_trunk(file).fingerprint
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    bits = [*range(64), *range(64, 8 * header, 29)]
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert load_trunk(file).fingerprint == fingerprint
        except EngramError:
            refused += 1
    assert refused > 0.95 * len(bits)


def test_the_trunk_does_not_depend_on_its_file(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(timm_names(random_trunk()), file)
    trunk = load_trunk(file)
    before = trunk.tokens(torch.ones(1, 3, 32, 32))
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(trunk.tokens(torch.ones(1, 3, 32, 32)), before)


# The Hub, from its cache: no test reaches a network


@pytest.fixture
def cached(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository owner/name in a cache of the Hub, at two revisions."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "cache" / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repo / "refs" / revision).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
    for file in folder.iterdir():
        (repo / "snapshots" / ("a" * 40) / file.name).write_bytes(file.read_bytes())
    return repo


def test_a_hub_id_is_found_in_the_cache(cached: Path, folder: Path) -> None:
    trunk = load_trunk("owner/name")
    assert trunk.fingerprint == load_trunk(folder).fingerprint
    assert trunk.source == "owner/name"
    assert load_trunk("owner/name@main").source == "owner/name@main"
    assert load_trunk("hf:owner/name@main").source == "owner/name@main"  # as engrams are named
    assert load_trunk("owner/name", revision="main").source == "owner/name@main"
    assert "no config.json" in sentence("owner/name@v2")
    (cached / "snapshots" / ("b" * 40) / "config.json").write_text('{"model_type": "vit"}')
    assert "no model.safetensors" in sentence("owner/name@v2")


def test_without_a_network_the_sentence_says_what_was_tried(cached: Path) -> None:
    text = sentence("owner/other")
    for part in ("owner/other", "HF_HUB_OFFLINE", "path", str(cached.parent)):
        assert part in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GatedRepoError, "gated"),
        (RepositoryNotFoundError, "hf auth login"),
        (RevisionNotFoundError, "revision"),
        (ConnectionResetError, "could not be fetched"),
        (TimeoutError, "could not be fetched"),
    ],
)
def test_what_the_hub_refuses(
    error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    assert said in sentence("owner/name", revision="v9")


def test_public_names() -> None:
    assert engram.load_trunk is load_trunk
    assert {"load_trunk", "save_trunk"} <= set(engram.__all__)
