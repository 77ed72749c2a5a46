"""Tensor names of each library as tables, by which `translate.py` gives tensors our names.

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
    """Tensor names of one library, or of one family in it."""

    names: Names
    prefixes: tuple[str, ...] = ()  # removed where a file has them
    ignored: tuple[str, ...] = ()  # patterns of tensors that are not part of the backbone
    required: tuple[str, ...] = ()  # optional in a ViT, but not in this family
    zero_biases: bool = False  # queries, keys or values without a bias have one of zeros


def _blocks(at: str, **theirs: str | tuple[str, ...]) -> Names:
    """The names of a layer: `at` is where it is, and `mlp_fc1` stands for our `mlp.fc1`."""
    names: Names = {}
    for ours, name in theirs.items():
        full = at + name if isinstance(name, str) else tuple(at + part for part in name)
        names[f"blocks.{{i}}.{re.sub('^mlp_', 'mlp.', ours)}"] = full
    return names


def _each(pattern: str, *parts: str) -> tuple[str, ...]:
    return tuple(pattern.replace("*", part) for part in parts)


# transformers: ViT (and MAE's encoder), DeiT, DINOv2 with and without registers, DINOv3, CLIP,
# SigLIP, AIMv2

_VIT: Names = {
    "patch": "embeddings.patch_embeddings.projection",
    "class_token": "embeddings.cls_token",
    "position": "embeddings.position_embeddings",
    **_blocks(
        "encoder.layer.{i}.",
        norm1="layernorm_before",
        qkv=_each("attention.attention.*", "query", "key", "value"),
        proj="attention.output.dense",
        norm2="layernorm_after",
        mlp_fc1="intermediate.dense",
        mlp_fc2="output.dense",
    ),
    "norm": "layernorm",
    "head.linear": "classifier",
}
_DEIT: Names = _VIT | {"registers": "embeddings.distillation_token"}
_DEIT_TEACHER: Names = _DEIT | {
    "head.linear": "cls_classifier",
    "head.distilled": "distillation_classifier",
}
_DINOV2: Names = {
    **_VIT,
    "registers": "embeddings.register_tokens",
    **_blocks(
        "encoder.layer.{i}.",
        norm1="norm1",
        scale1="layer_scale1.lambda1",
        norm2="norm2",
        mlp_fc1="mlp.fc1",
        mlp_fc2="mlp.fc2",
        scale2="layer_scale2.lambda1",
    ),
}
_DINOV2_SWIGLU: Names = _DINOV2 | _blocks(
    "encoder.layer.{i}.mlp.", mlp_fc1="weights_in", mlp_fc2="weights_out"
)
_DINOV2_GATED: Names = _DINOV2 | _blocks(  # the same, as models of transformers 5 have it in memory
    "encoder.layer.{i}.mlp.", mlp_fc1=("gate_proj", "up_proj"), mlp_fc2="down_proj"
)
_DINOV3: Names = {
    "patch": "embeddings.patch_embeddings",
    "class_token": "embeddings.cls_token",
    "registers": "embeddings.register_tokens",
    **_blocks(
        "layer.{i}.",
        norm1="norm1",
        qkv=_each("attention.*_proj", "q", "k", "v"),
        proj="attention.o_proj",
        scale1="layer_scale1.lambda1",
        norm2="norm2",
        mlp_fc1="mlp.up_proj",
        mlp_fc2="mlp.down_proj",
        scale2="layer_scale2.lambda1",
    ),
    "norm": "norm",
}
_DINOV3_GATED: Names = _DINOV3 | _blocks("layer.{i}.mlp.", mlp_fc1=("gate_proj", "up_proj"))
_TOWER: Names = {
    "patch": "embeddings.patch_embedding",
    "position": "embeddings.position_embedding.weight",
    **_blocks(
        "encoder.layers.{i}.",
        norm1="layer_norm1",
        qkv=_each("self_attn.*_proj", "q", "k", "v"),
        proj="self_attn.out_proj",
        norm2="layer_norm2",
        mlp_fc1="mlp.fc1",
        mlp_fc2="mlp.fc2",
    ),
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
    **_blocks(
        "encoder.layers.{i}.",
        norm1="rms_norm1",
        qkv=_each("attention.*_proj", "q", "k", "v"),
        proj="attention.out_proj",
        norm2="rms_norm2",
        mlp_fc1=("ffn.gate_proj", "ffn.up_proj"),
        mlp_fc2="ffn.down_proj",
    ),
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
    **_blocks(
        "backbone.blocks.{i}.",
        norm1="norm_1",
        qkv="attn.qkv",
        proj="attn.proj",
        norm2="norm_2",
        mlp_fc1=("mlp.fc1", "mlp.fc3"),
        mlp_fc2="mlp.fc2",
    ),
    "norm": "backbone.post_backbone_norm",
}
_CLIP_CLASSIFIER: Names = _CLIP | {"head.linear": "classifier"}  # in place of the projection
# Its classifier reads the mean of the tokens; the attention pooling in the file is unused.
_SIGLIP_CLASSIFIER: Names = _TOWER | {"head.linear": "classifier"}

_NOT_IN_BACKBONE: tuple[str, ...] = (
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


# The usual table of each family, and what every file of it has to have.
_TABLES: dict[str, tuple[Names, tuple[str, ...]]] = {
    "vit": (_VIT, ("class_token",)),
    "deit": (_DEIT, ("class_token", "registers")),
    "dinov2": (_DINOV2, ("class_token", "blocks.0.scale1", "blocks.0.scale2")),
    "dinov3": (_DINOV3, ("class_token", "blocks.0.scale1", "blocks.0.scale2")),
    "clip": (_CLIP, ("class_token", "pre_norm.weight")),
    "siglip": (_SIGLIP, ()),
    "aimv2": (_AIMV2, ("patch_norm.weight",)),
}
# The tables of variants, by a part of a tensor name that only these have.
_VARIANTS: dict[str, dict[str, Names]] = {
    "deit": {"cls_classifier.": _DEIT_TEACHER},
    "dinov2": {".mlp.weights_in.": _DINOV2_SWIGLU, ".mlp.gate_proj.": _DINOV2_GATED},
    "dinov3": {".mlp.gate_proj.": _DINOV3_GATED},
    "clip": {"classifier.": _CLIP_CLASSIFIER},
    "siglip": {"classifier.": _SIGLIP_CLASSIFIER},
    "aimv2": {"preprocessor.patchifier.": _AIMV2_APPLE},
}


def transformers_layout(kind: str, names: Iterable[str]) -> Layout:
    """The layout of a transformers model_type. The tensor names tell its variants apart."""
    family, names = FAMILIES[kind], list(names)
    (table, required), ignored = _TABLES[family], _NOT_IN_BACKBONE
    for part, variant in _VARIANTS.get(family, {}).items():
        if any(part in name for name in names):
            table = variant
    if kind == "dinov2_with_registers":
        required += ("registers",)
    if table is _SIGLIP_CLASSIFIER:
        ignored += (r"head\..+",)
    return Layout(table, _PREFIXES, ignored, required, zero_biases=family == "dinov3")


# Where models of transformers 5 have other names in memory than in their files.
_RENAMED: Sequence[tuple[str, str]] = (
    (r"^((?:vit\.|deit\.)?)layers\.(\d+)\.mlp\.fc1\.", r"\1encoder.layer.\2.intermediate.dense."),
    (r"^((?:vit\.|deit\.)?)layers\.(\d+)\.mlp\.fc2\.", r"\1encoder.layer.\2.output.dense."),
    (r"^((?:vit\.|deit\.)?)layers\.(\d+)\.", r"\1encoder.layer.\2."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
_RENAMED_BY_FAMILY: dict[str, Sequence[tuple[str, str]]] = {
    **dict.fromkeys(("vit", "deit", "dinov2"), _RENAMED),
    "dinov3": ((r"^model\.layer\.", "layer."),),
}


def as_on_disk(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict of a transformers model, of any version, under the names of its files."""
    out = {}
    for name, tensor in tensors.items():
        for pattern, instead in _RENAMED_BY_FAMILY.get(FAMILIES[kind], ()):
            name = re.sub(pattern, instead, name)
        out[name] = tensor
    return out


def split_in_proj(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the one `in_proj` of SigLIP's pooling into q and kv."""
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
    **_blocks(
        "blocks.{i}.",
        norm1="norm1",
        qkv="attn.qkv",
        read_norm="attn.norm",
        proj="attn.proj",
        scale1="ls1.gamma",
        norm2="norm2",
        mlp_fc1="mlp.fc1",
        mlp_norm="mlp.norm",
        mlp_fc2="mlp.fc2",
        scale2="ls2.gamma",
    ),
    "norm": "norm",
    "head.pool.probe": "attn_pool.latent",
    **{
        f"head.pool.{name}": f"attn_pool.{name}"
        for name in ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")
    },
    "head.norm": "fc_norm",
    "head.hidden": "pre_logits.fc",
    "head.linear": "head",
}
# What some of its files have instead, by a part of a name that only these have.
_TIMM_INSTEAD: dict[str, Names] = {
    "dist_token": {"registers": "dist_token", "head.distilled": "head_dist"},
    ".gamma_1": _blocks("blocks.{i}.", scale1="gamma_1", scale2="gamma_2"),
    ".attn.q_proj.": _blocks("blocks.{i}.attn.", qkv=_each("*_proj", "q", "k", "v")),
    ".mlp.fc1_g.": _blocks("blocks.{i}.mlp.", mlp_fc1=("fc1_g", "fc1_x")),
    # Meta's own names of DINOv3
    "storage_tokens": {"registers": "storage_tokens"},
    ".mlp.w3.": _blocks("blocks.{i}.mlp.", mlp_fc1=("w1", "w2"), mlp_fc2="w3"),
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

GOOGLE = Layout(
    {
        "patch": "embedding",
        "class_token": "cls",
        "position": "Transformer/posembed_input/pos_embedding",
        **_blocks(
            "Transformer/encoderblock_{i}/",
            norm1="LayerNorm_0",
            qkv=_each("MultiHeadDotProductAttention_1/*", "query", "key", "value"),
            proj="MultiHeadDotProductAttention_1/out",
            norm2="LayerNorm_2",
            mlp_fc1="MlpBlock_3/Dense_0",
            mlp_fc2="MlpBlock_3/Dense_1",
        ),
        "norm": "Transformer/encoder_norm",
        "head.hidden": "pre_logits",
        "head.linear": "head",
    },
    prefixes=("opt/target/",),
    required=("class_token",),
)


def google_to_torch(name: str, array: Tensor) -> Tensor:
    """One of Google's tensors with the axes that torch uses. The values do not change."""
    if array.ndim == 4:  # (rows, columns, in, out) -> (out, in, rows, columns)
        return array.permute(3, 2, 0, 1)
    if re.search(r"/(query|key|value)/", name):  # (D, h, d) -> (h d, D), and (h, d) -> (h d)
        return array.flatten(1).T if name.endswith("kernel") else array.flatten()
    if name.endswith("/out/kernel"):  # (h, d, D) -> (D, h d)
        return array.flatten(0, -2).T
    return array.T if name.endswith("kernel") else array
