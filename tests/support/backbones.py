"""Small random ViTs of every supported family, under the tensor names of each library."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engram import EngramError, ViT, load_backbone

SIZE = {"image_size": 32, "patch_size": 8}
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SIZE}
VIT = {**COMMON, "intermediate_size": 48}
DINO = {**COMMON, "mlp_ratio": 2}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
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


def two_towers() -> dict[str, Any]:
    """The configuration of a CLIP or SigLIP with both towers."""
    return {"text_config": TEXT, "vision_config": VIT}


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
    "dinov3": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**VIT, num_register_tokens=3)
    ),
    "dinov3-gated": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**VIT, **GATED, num_register_tokens=2)
    ),
    "dinov3-no-bias": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**VIT, query_bias=False, value_bias=False, rope_theta=50.0)
    ),
    "clip-vision": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VIT)),
    "clip-gelu": lambda: transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(**VIT, hidden_act="gelu")
    ),
    "clip-projection": lambda: transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(**VIT, projection_dim=7)
    ),
    "clip-full": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(**two_towers(), projection_dim=7)
    ),
    "clip-classes": lambda: transformers.CLIPForImageClassification(
        transformers.CLIPConfig(**two_towers(), num_labels=5)
    ),
    "siglip-vision": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VIT)),
    "siglip-no-head": lambda: transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**VIT, vision_use_head=False)
    ),
    "siglip-full": lambda: transformers.SiglipModel(transformers.SiglipConfig(**two_towers())),
    "siglip-classes": lambda: transformers.SiglipForImageClassification(
        transformers.SiglipConfig(**two_towers(), num_labels=5)
    ),
    # SigLIP 2 of fixed resolution: the Hub has it as a SigLIP with another text tower.
    "siglip2": lambda: transformers.SiglipModel(
        transformers.SiglipConfig(
            text_config={**TEXT, "vocab_size": 256, "projection_size": 32}, vision_config=VIT
        )
    ),
    "aimv2": lambda: transformers.Aimv2VisionModel(
        transformers.Aimv2VisionConfig(**VIT, use_head=False)
    ),
    "aimv2-head": lambda: transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**VIT)),
    "aimv2-native": lambda: transformers.Aimv2VisionModel(
        transformers.Aimv2VisionConfig(**VIT, is_native=True)
    ),
    "aimv2-full": lambda: transformers.Aimv2Model(
        transformers.Aimv2Config(
            text_config={**TEXT, "eos_token_id": 2}, vision_config=VIT, projection_dim=7
        )
    ),
}
#: Of these, transformers does not resize the position embeddings.
ONE_SIZE = ("aimv2", "aimv2-head", "aimv2-full")


def mae() -> nn.Module:
    """A masked autoencoder that masks nothing, so its encoder sees every patch."""
    config = transformers.ViTMAEConfig(**VIT, mask_ratio=0.0, decoder_hidden_size=16,
                                       decoder_num_attention_heads=2, decoder_num_hidden_layers=1,
                                       decoder_intermediate_size=16)  # fmt: skip
    return randomised(transformers.ViTMAEForPreTraining(config))


def mae_reference(model: nn.Module, pixels: Tensor) -> Tensor:
    """The last tokens of its encoder, with the patches in their own order."""
    with torch.no_grad():
        kept_order = torch.arange(16.0).expand(len(pixels), -1)
        return model.vit(pixels, noise=kept_order).last_hidden_state


def tower(model: nn.Module) -> nn.Module:
    """The part of a model of transformers that is the ViT."""
    for name in ("vit", "deit", "dinov2", "dinov2_with_registers", "vision_model"):
        if isinstance(getattr(model, name, None), nn.Module):
            return getattr(model, name)
    return model


def reference(model: nn.Module, pixels: Tensor, native: bool) -> tuple[Tensor, Tensor | None]:
    """What transformers computes: the last normed tokens, and the answer if there is a head."""
    resize: dict[str, Any] = {} if native else {"interpolate_pos_encoding": True}
    if type(model).__name__.startswith(("Dinov2", "DINOv3", "Aimv2")):
        resize = {}  # always does, or never
    with torch.no_grad():
        out = tower(model)(pixels, **resize)
        tokens = out.last_hidden_state
        if "CLIP" in type(model).__name__:
            tokens = tower(model).post_layernorm(tokens)
        both = transformers.CLIPModel | transformers.SiglipModel | transformers.Aimv2Model
        if isinstance(model, both):
            return tokens, model.get_image_features(pixels, **resize).pooler_output
        if isinstance(model, transformers.SiglipVisionModel | transformers.Aimv2VisionModel):
            return tokens, out.pooler_output
        if "ForImageClassification" in type(model).__name__:
            return tokens, model(pixels, **resize).logits
        if "WithProjection" in type(model).__name__:
            return tokens, model(pixels, **resize).image_embeds
    return tokens, None


# The same tensors under other names


def timm_names(backbone: ViT) -> dict[str, Tensor]:
    """A backbone's tensors under timm's names, written independently of the package's tables."""
    out = {}
    for name, tensor in backbone.state_dict().items():
        renamed = name
        for ours, theirs in (
            ("patch.", "patch_embed.proj."),
            ("patch_norm.", "patch_embed.norm."),
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
        distilled = backbone.config.prefix_positions == 2
        out["dist_token" if distilled else "reg_token"] = out.pop("registers")[None]
    position = [out.pop("prefix_position")] if "prefix_position" in out else []
    if "position" in out:
        out["pos_embed"] = torch.cat([*position, out.pop("position")])[None]
    return _as_eva(out) if backbone.config.rotary is not None else out


def _as_eva(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As timm's Eva calls what its VisionTransformer calls otherwise; its keys have no bias."""
    out = {}
    for name, tensor in tensors.items():
        name = name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")
        if name.endswith("attn.qkv.bias"):
            q, k, v = tensor.clone().chunk(3)
            assert not k.any()
            out |= {
                name.replace("qkv.bias", f"{n}_bias"): t.clone()
                for n, t in zip("qv", (q, v), strict=True)
            }
        else:
            out[name] = tensor
    return _split_gates(out)


def _split_gates(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A gated MLP as timm's SwiGLU has it: the gate and the rest are two layers."""
    out = {}
    for name, tensor in tensors.items():
        second = tensors.get(name.replace(".fc1.", ".fc2.").replace("bias", "weight"))
        if ".mlp.fc1." in name and second is not None and len(tensor) == 2 * second.shape[1]:
            gate, value = tensor.clone().chunk(2)
            out[name.replace(".fc1.", ".fc1_g.")] = gate.clone()
            out[name.replace(".fc1.", ".fc1_x.")] = value.clone()
        else:
            out[name] = tensor
    return out


# timm's configuration of each family.
TIMM = {
    "vit-classes": {"architecture": "vit_base_patch16_224"},
    "vit-no-pooler": {"architecture": "vit_base_patch16_224_miil"},
    "deit-teacher": {"architecture": "deit_tiny_distilled_patch16_224"},
    "dinov2": {"architecture": "vit_small_patch14_dinov2"},
    "dinov2-swiglu": {"architecture": "vit_giant_patch14_dinov2"},
    "dinov2-registers": {"architecture": "vit_small_patch14_reg4_dinov2"},
    "dinov3": {"architecture": "vit_small_patch16_dinov3_qkvb"},
    "dinov3-gated": {"architecture": "vit_small_plus_patch16_dinov3_qkvb"},
    "aimv2": {"architecture": "aimv2_large_patch14_224"},
    "clip-vision": {"architecture": "vit_base_patch32_clip_quickgelu_224"},
    "clip-projection": {
        "architecture": "vit_base_patch32_clip_224",
        "pretrained_cfg": {"tag": "openai"},
    },
    "clip-gelu": {"architecture": "vit_base_patch32_clip_224"},
    "siglip-vision": {"architecture": "vit_base_patch16_siglip_224", "global_pool": "map"},
    "siglip-no-head": {"architecture": "vit_base_patch16_siglip_gap_224", "global_pool": "avg"},
}


def timm_tensors(family: str, backbone: ViT) -> dict[str, Tensor]:
    """What a file of timm would hold for a family of `TIMM`."""
    names = timm_names(backbone)
    if family == "clip-projection":
        names["head.bias"] = torch.zeros(len(names["head.weight"]))
    if family == "dinov2-swiglu":  # timm has none with a head over class and mean
        names = {name: tensor for name, tensor in names.items() if not name.startswith("head.")}
    return _split_gates(names) if family == "aimv2" else names


# What timm computed: scripts/record_timm.py

RECORDS = {path.stem: path for path in sorted((Path(__file__).parent / "timm").iterdir())}


@dataclass(frozen=True)
class TimmRecord:
    """A tiny model of timm, and what it computed."""

    weights: dict[str, Tensor]
    config: dict[str, Any]  # as of config.json
    cases: list[tuple[Tensor, Tensor, Tensor]]  # pixels, tokens, answer

    def save(self, folder: Path) -> Path:
        """Write it as a folder of timm."""
        save_file(self.weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def timm_record(name: str) -> TimmRecord:
    with safe_open(RECORDS[name], "pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    weights = {n.removeprefix("weights."): t for n, t in found.items() if n.startswith("weights.")}
    sizes = [n.removeprefix("pixels.") for n in found if n.startswith("pixels.")]
    cases = [(found[f"pixels.{s}"], found[f"tokens.{s}"], found[f"answer.{s}"]) for s in sizes]
    return TimmRecord(weights, config, cases)


def google_names(backbone: ViT) -> dict[str, np.ndarray[Any, Any]]:
    """A backbone's tensors under Google's names and with Google's axes."""
    heads, width = backbone.config.heads, backbone.config.width
    state = {name: tensor.numpy() for name, tensor in backbone.state_dict().items()}
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
    for i in range(backbone.config.depth):
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


# What tests do with them


def near(ours: Tensor, theirs: Tensor, within: float = 1e-5) -> None:
    """Assert that two tensors agree."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= within


def update(path: Path, **changes: Any) -> None:
    """Change settings of a JSON file, which is created if needed."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def refusal(source: object, **options: Any) -> str:
    """The sentence with which `load_backbone` refuses a source."""
    with pytest.raises(EngramError) as error:
        load_backbone(source, **options)  # type: ignore[arg-type]
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text
