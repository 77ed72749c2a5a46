"""What each library calls the tensors of a ViT: one table per layout.

A table maps our module to theirs. `{i}` is the number of a layer, a tuple is concatenated along the
rows (three projections become one `qkv`), and `weight` and `bias` follow their module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Names = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """How the files of one library, or of one family in it, name the tensors of a ViT."""

    names: Names
    prefixes: tuple[str, ...] = ()  # removed where a file has them
    ignored: tuple[str, ...] = ()  # patterns of tensors that are not part of the backbone
    required: tuple[str, ...] = ()  # optional in a ViT, but not in this family
    zero_biases: bool = False  # queries, keys or values without a bias have one of zeros


# transformers: ViT (and MAE's encoder), DeiT, DINOv2 with and without registers, DINOv3, CLIP,
# SigLIP, AIMv2

_ATTENTION = "encoder.layer.{i}.attention.attention."
_VIT: Names = {
    "patch": "embeddings.patch_embeddings.projection",
    "class_token": "embeddings.cls_token",
    "position": "embeddings.position_embeddings",
    "blocks.{i}.norm1": "encoder.layer.{i}.layernorm_before",
    "blocks.{i}.qkv": (_ATTENTION + "query", _ATTENTION + "key", _ATTENTION + "value"),
    "blocks.{i}.proj": "encoder.layer.{i}.attention.output.dense",
    "blocks.{i}.norm2": "encoder.layer.{i}.layernorm_after",
    "blocks.{i}.mlp.fc1": "encoder.layer.{i}.intermediate.dense",
    "blocks.{i}.mlp.fc2": "encoder.layer.{i}.output.dense",
    "norm": "layernorm",
    "head.linear": "classifier",
}
_DEIT: Names = _VIT | {"registers": "embeddings.distillation_token"}
_DEIT_TEACHER: Names = _DEIT | {
    "head.linear": "cls_classifier",
    "head.distilled": "distillation_classifier",
}
_DINOV2: Names = _VIT | {
    "registers": "embeddings.register_tokens",
    "blocks.{i}.norm1": "encoder.layer.{i}.norm1",
    "blocks.{i}.scale1": "encoder.layer.{i}.layer_scale1.lambda1",
    "blocks.{i}.norm2": "encoder.layer.{i}.norm2",
    "blocks.{i}.mlp.fc1": "encoder.layer.{i}.mlp.fc1",
    "blocks.{i}.mlp.fc2": "encoder.layer.{i}.mlp.fc2",
    "blocks.{i}.scale2": "encoder.layer.{i}.layer_scale2.lambda1",
}
_DINOV2_SWIGLU: Names = _DINOV2 | {
    "blocks.{i}.mlp.fc1": "encoder.layer.{i}.mlp.weights_in",
    "blocks.{i}.mlp.fc2": "encoder.layer.{i}.mlp.weights_out",
}
_DINOV2_GATED: Names = _DINOV2 | {  # the same, as models of transformers 5 have it in memory
    "blocks.{i}.mlp.fc1": (
        "encoder.layer.{i}.mlp.gate_proj",
        "encoder.layer.{i}.mlp.up_proj",
    ),
    "blocks.{i}.mlp.fc2": "encoder.layer.{i}.mlp.down_proj",
}
_DINOV3: Names = {
    "patch": "embeddings.patch_embeddings",
    "class_token": "embeddings.cls_token",
    "registers": "embeddings.register_tokens",
    "blocks.{i}.norm1": "layer.{i}.norm1",
    "blocks.{i}.qkv": (
        "layer.{i}.attention.q_proj",
        "layer.{i}.attention.k_proj",
        "layer.{i}.attention.v_proj",
    ),
    "blocks.{i}.proj": "layer.{i}.attention.o_proj",
    "blocks.{i}.scale1": "layer.{i}.layer_scale1.lambda1",
    "blocks.{i}.norm2": "layer.{i}.norm2",
    "blocks.{i}.mlp.fc1": "layer.{i}.mlp.up_proj",
    "blocks.{i}.mlp.fc2": "layer.{i}.mlp.down_proj",
    "blocks.{i}.scale2": "layer.{i}.layer_scale2.lambda1",
    "norm": "norm",
}
_DINOV3_GATED: Names = _DINOV3 | {
    "blocks.{i}.mlp.fc1": ("layer.{i}.mlp.gate_proj", "layer.{i}.mlp.up_proj")
}
_TOWER: Names = {
    "patch": "embeddings.patch_embedding",
    "position": "embeddings.position_embedding.weight",
    "blocks.{i}.norm1": "encoder.layers.{i}.layer_norm1",
    "blocks.{i}.qkv": (
        "encoder.layers.{i}.self_attn.q_proj",
        "encoder.layers.{i}.self_attn.k_proj",
        "encoder.layers.{i}.self_attn.v_proj",
    ),
    "blocks.{i}.proj": "encoder.layers.{i}.self_attn.out_proj",
    "blocks.{i}.norm2": "encoder.layers.{i}.layer_norm2",
    "blocks.{i}.mlp.fc1": "encoder.layers.{i}.mlp.fc1",
    "blocks.{i}.mlp.fc2": "encoder.layers.{i}.mlp.fc2",
    "norm": "post_layernorm",
}
_CLIP: Names = _TOWER | {
    "class_token": "embeddings.class_embedding",
    "pre_norm": "pre_layrnorm",  # their spelling
    "head.linear": "visual_projection",
}
_SIGLIP: Names = _TOWER | {
    "head.pool.probe": "head.probe",
    "head.pool.q": "head.attention.q",  # `split_in_proj` makes q and kv from their one tensor
    "head.pool.kv": "head.attention.kv",
    "head.pool.proj": "head.attention.out_proj",
    "head.pool.norm": "head.layernorm",
    "head.pool.mlp.fc1": "head.mlp.fc1",
    "head.pool.mlp.fc2": "head.mlp.fc2",
}
_AIMV2: Names = {
    "patch": "embeddings.patch_embed",
    "patch_norm": "embeddings.rms_norm",
    "position": "embeddings.position_embedding.weight",
    "blocks.{i}.norm1": "encoder.layers.{i}.rms_norm1",
    "blocks.{i}.qkv": (
        "encoder.layers.{i}.attention.q_proj",
        "encoder.layers.{i}.attention.k_proj",
        "encoder.layers.{i}.attention.v_proj",
    ),
    "blocks.{i}.proj": "encoder.layers.{i}.attention.out_proj",
    "blocks.{i}.norm2": "encoder.layers.{i}.rms_norm2",
    "blocks.{i}.mlp.fc1": (
        "encoder.layers.{i}.ffn.gate_proj",
        "encoder.layers.{i}.ffn.up_proj",
    ),
    "blocks.{i}.mlp.fc2": "encoder.layers.{i}.ffn.down_proj",
    "norm": "rms_norm",
    "head.pool.probe": "head.cls_token",
    "head.pool.kv": ("head.k_proj", "head.v_proj"),
    "head.pool.proj": "head.output_proj",
    "head.linear": "visual_projection",
}
_AIMV2_APPLE: Names = {  # the files that Apple published first
    "patch": "preprocessor.patchifier.proj",
    "patch_norm": "preprocessor.patchifier.norm",
    "position": "preprocessor.pos_embed",
    "blocks.{i}.norm1": "backbone.blocks.{i}.norm_1",
    "blocks.{i}.qkv": "backbone.blocks.{i}.attn.qkv",
    "blocks.{i}.proj": "backbone.blocks.{i}.attn.proj",
    "blocks.{i}.norm2": "backbone.blocks.{i}.norm_2",
    "blocks.{i}.mlp.fc1": ("backbone.blocks.{i}.mlp.fc1", "backbone.blocks.{i}.mlp.fc3"),
    "blocks.{i}.mlp.fc2": "backbone.blocks.{i}.mlp.fc2",
    "norm": "backbone.post_backbone_norm",
}
_CLASSIFIER: Names = {"head.linear": "classifier"}  # replaces a projection or a pooling

_NOT_IN_BACKBONE = (
    r"pooler\.dense\..+",  # a tanh layer that transformers adds; no classifier reads it
    r"embeddings\.(mask_token|position_ids)",
    r"decoder(\.|_).+",  # of masked image modelling
    r"text_model\..+|text_projection\..+|logit_scale|logit_bias",
)
_PREFIXES = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.", "vision_model.")


# model_type in config.json -> family
FAMILIES = {
    "vit": "vit",
    "vit_mae": "vit",
    "deit": "deit",
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2",
    "dinov3_vit": "dinov3",
    "clip": "clip",
    "clip_vision_model": "clip",
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
    "aimv2": "aimv2",
    "aimv2_vision_model": "aimv2",
}


def transformers_layout(kind: str, names: Iterable[str]) -> Layout:
    """The layout of a transformers model_type. The tensor names tell its variants apart."""
    family = FAMILIES[kind]
    names = set(names)
    classifier = any(name.startswith("classifier.") for name in names)
    required: tuple[str, ...] = ("class_token",)
    ignored: tuple[str, ...] = _NOT_IN_BACKBONE
    table = _VIT
    if family == "deit":
        teacher = any(name.startswith("cls_classifier.") for name in names)
        table = _DEIT_TEACHER if teacher else _DEIT
        required += ("registers",)
    elif family == "dinov2":
        table = _DINOV2
        if any(".mlp.weights_in." in name for name in names):
            table = _DINOV2_SWIGLU
        elif any(".mlp.gate_proj." in name for name in names):
            table = _DINOV2_GATED
        required += ("blocks.0.scale1", "blocks.0.scale2")
        required += ("registers",) if kind == "dinov2_with_registers" else ()
    elif family == "dinov3":
        table = _DINOV3_GATED if any(".mlp.gate_proj." in name for name in names) else _DINOV3
        required += ("blocks.0.scale1", "blocks.0.scale2")
    elif family == "aimv2":
        apple = any(name.startswith("preprocessor.patchifier.") for name in names)
        table = _AIMV2_APPLE if apple else _AIMV2
        required = ("patch_norm.weight",)
    elif family == "clip":
        table = _CLIP | _CLASSIFIER if classifier else _CLIP
        required += ("pre_norm.weight",)
    elif family == "siglip":
        # Its classifier reads the mean of the tokens; the attention pooling in the file is unused.
        table = _TOWER | _CLASSIFIER if classifier else _SIGLIP
        ignored += (r"head\..+",) if classifier else ()
        required = ()
    return Layout(table, _PREFIXES, ignored, required, zero_biases=family == "dinov3")


# Where models of transformers 5 have other names in memory than in their files.
_RENAMED = (
    (r"^((?:vit\.|deit\.)?)layers\.(\d+)\.mlp\.fc1\.", r"\1encoder.layer.\2.intermediate.dense."),
    (r"^((?:vit\.|deit\.)?)layers\.(\d+)\.mlp\.fc2\.", r"\1encoder.layer.\2.output.dense."),
    (r"^((?:vit\.|deit\.)?)layers\.(\d+)\.", r"\1encoder.layer.\2."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)


def as_on_disk(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict of a transformers model, of any version, under the names of its files."""
    family = FAMILIES[kind]
    renamed: Sequence[tuple[str, str]] = ()
    if family in ("vit", "deit", "dinov2"):
        renamed = _RENAMED
    if family == "dinov3":
        renamed = ((r"^model\.layer\.", "layer."),)
    out = {}
    for name, tensor in tensors.items():
        for pattern, instead in renamed:
            name = re.sub(pattern, instead, name)
        out[name] = tensor
    return out


def split_in_proj(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SigLIP's pooling has one `in_proj` for queries, keys and values; here it becomes q and kv."""
    out = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"((?:.+\.)?head\.attention\.)in_proj_(weight|bias)", name)
        if match is None or tensor.shape[0] % 3:
            out[name] = tensor
            continue
        rows = tensor.shape[0] // 3
        out[f"{match[1]}q.{match[2]}"] = tensor[:rows]
        out[f"{match[1]}kv.{match[2]}"] = tensor[rows:]
    return out


# timm: its VisionTransformer, and its Eva, which has rotary positions

_TIMM: Names = {
    "patch": "patch_embed.proj",
    "class_token": "cls_token",
    "registers": "reg_token",
    "position": "pos_embed",
    "patch_norm": "patch_embed.norm",
    "pre_norm": "norm_pre",
    "blocks.{i}.norm1": "blocks.{i}.norm1",
    "blocks.{i}.qkv": "blocks.{i}.attn.qkv",
    "blocks.{i}.read_norm": "blocks.{i}.attn.norm",
    "blocks.{i}.proj": "blocks.{i}.attn.proj",
    "blocks.{i}.scale1": "blocks.{i}.ls1.gamma",
    "blocks.{i}.norm2": "blocks.{i}.norm2",
    "blocks.{i}.mlp.fc1": "blocks.{i}.mlp.fc1",
    "blocks.{i}.mlp.norm": "blocks.{i}.mlp.norm",
    "blocks.{i}.mlp.fc2": "blocks.{i}.mlp.fc2",
    "blocks.{i}.scale2": "blocks.{i}.ls2.gamma",
    "norm": "norm",
    "head.pool.probe": "attn_pool.latent",
    "head.pool.q": "attn_pool.q",
    "head.pool.kv": "attn_pool.kv",
    "head.pool.proj": "attn_pool.proj",
    "head.pool.norm": "attn_pool.norm",
    "head.pool.mlp.fc1": "attn_pool.mlp.fc1",
    "head.pool.mlp.fc2": "attn_pool.mlp.fc2",
    "head.norm": "fc_norm",
    "head.hidden": "pre_logits.fc",
    "head.linear": "head",
}
# What some of its files have instead, by a part of a name that only these have.
_TIMM_INSTEAD: dict[str, Names] = {
    "dist_token": {"registers": "dist_token", "head.distilled": "head_dist"},
    ".gamma_1": {
        "blocks.{i}.scale1": "blocks.{i}.gamma_1",
        "blocks.{i}.scale2": "blocks.{i}.gamma_2",
    },
    ".attn.q_proj.": {
        "blocks.{i}.qkv": (
            "blocks.{i}.attn.q_proj",
            "blocks.{i}.attn.k_proj",
            "blocks.{i}.attn.v_proj",
        )
    },
    ".mlp.fc1_g.": {"blocks.{i}.mlp.fc1": ("blocks.{i}.mlp.fc1_g", "blocks.{i}.mlp.fc1_x")},
    # Meta's own names of DINOv3
    "storage_tokens": {"registers": "storage_tokens"},
    ".mlp.w3.": {
        "blocks.{i}.mlp.fc1": ("blocks.{i}.mlp.w1", "blocks.{i}.mlp.w2"),
        "blocks.{i}.mlp.fc2": "blocks.{i}.mlp.w3",
    },
}
_TIMM_IGNORED = (
    r"mask_token",
    r"decoder_.+",
    r"rope_embed\.periods|.+\.bias_mask|local_cls_norm\..+",  # of Meta's DINOv3
)


def timm_layout(names: Iterable[str]) -> Layout:
    """The layout of timm's ViTs. The tensor names tell its variants apart."""
    names, table = list(names), dict(_TIMM)
    for part, instead in _TIMM_INSTEAD.items():
        if any(part in name for name in names):
            table |= instead
    learned = any(name.endswith("pos_embed") for name in names)
    rotary = not learned or any(".attn.q_proj." in name for name in names)
    return Layout(table, ("timm_model.",), _TIMM_IGNORED, zero_biases=rotary)


def join_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One bias for queries, keys and values; keys, which have none in timm's Eva, get zeros.

    Meta's own files of DINOv3 have numbers there, and a mask that sets them to zero.
    """
    out = dict(tensors)
    for name in tensors:
        if name.endswith(".attn.q_bias") and f"{name[:-6]}v_bias" in tensors:
            q, v = out.pop(name), out.pop(f"{name[:-6]}v_bias")
            out[f"{name[:-6]}qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
        elif name.endswith(".attn.qkv.bias") and "storage_tokens" in tensors:
            q, k, v = tensors[name].chunk(3)
            out[name] = torch.cat([q, torch.zeros_like(k), v])
    return out


# Google's JAX weights: kernels are transposed, and the heads are an axis of their own

_ENCODER = "Transformer/encoderblock_{i}/"
_DOT = _ENCODER + "MultiHeadDotProductAttention_1/"
GOOGLE = Layout(
    {
        "patch": "embedding",
        "class_token": "cls",
        "position": "Transformer/posembed_input/pos_embedding",
        "blocks.{i}.norm1": _ENCODER + "LayerNorm_0",
        "blocks.{i}.qkv": (_DOT + "query", _DOT + "key", _DOT + "value"),
        "blocks.{i}.proj": _DOT + "out",
        "blocks.{i}.norm2": _ENCODER + "LayerNorm_2",
        "blocks.{i}.mlp.fc1": _ENCODER + "MlpBlock_3/Dense_0",
        "blocks.{i}.mlp.fc2": _ENCODER + "MlpBlock_3/Dense_1",
        "norm": "Transformer/encoder_norm",
        "head.hidden": "pre_logits",
        "head.linear": "head",
    },
    prefixes=("opt/target/",),
    required=("class_token",),
)


def as_torch(name: str, array: Tensor) -> Tensor:
    """One of Google's tensors with the axes that torch uses. The values do not change."""
    if array.ndim == 4:  # (rows, columns, in, out) -> (out, in, rows, columns)
        return array.permute(3, 2, 0, 1)
    if re.search(r"/(query|key|value)/", name):  # (D, h, d) -> (h d, D), and (h, d) -> (h d)
        return array.flatten(1).T if name.endswith("kernel") else array.flatten()
    if name.endswith("/out/kernel"):  # (h, d, D) -> (D, h d)
        return array.flatten(0, -2).T
    return array.T if name.endswith("kernel") else array
