"""What each library calls the tensors of a ViT: one table per layout.

A table maps our module to theirs. `{i}` is the number of a layer, a tuple is concatenated along the
rows (three projections become one `qkv`), and `weight` and `bias` follow their module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

Names = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """How the files of one library, or of one family in it, name the tensors of a ViT."""

    names: Names
    prefixes: tuple[str, ...] = ()  # removed where a file has them
    ignored: tuple[str, ...] = ()  # patterns of tensors that are not part of the trunk
    required: tuple[str, ...] = ()  # optional in a ViT, but not in this family


# transformers: ViT (and MAE's encoder), DeiT, DINOv2 with and without registers, CLIP, SigLIP

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
_CLASSIFIER: Names = {"head.linear": "classifier"}  # replaces a projection or a pooling

_NOT_IN_TRUNK = (
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
    "clip": "clip",
    "clip_vision_model": "clip",
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
}


def transformers_layout(kind: str, names: Iterable[str]) -> Layout:
    """The layout of a transformers model_type. The tensor names tell its variants apart."""
    family = FAMILIES[kind]
    names = set(names)
    classifier = any(name.startswith("classifier.") for name in names)
    required: tuple[str, ...] = ("class_token",)
    ignored: tuple[str, ...] = _NOT_IN_TRUNK
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
    elif family == "clip":
        table = _CLIP | _CLASSIFIER if classifier else _CLIP
        required += ("pre_norm.weight",)
    elif family == "siglip":
        # Its classifier reads the mean of the tokens; the attention pooling in the file is unused.
        table = _TOWER | _CLASSIFIER if classifier else _SIGLIP
        ignored += (r"head\..+",) if classifier else ()
        required = ()
    return Layout(table, _PREFIXES, ignored, required)


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
    renamed = _RENAMED if FAMILIES[kind] in ("vit", "deit", "dinov2") else ()
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


# timm: its one VisionTransformer, whatever the weights

_TIMM: Names = {
    "patch": "patch_embed.proj",
    "class_token": "cls_token",
    "registers": "reg_token",
    "position": "pos_embed",
    "pre_norm": "norm_pre",
    "blocks.{i}.norm1": "blocks.{i}.norm1",
    "blocks.{i}.qkv": "blocks.{i}.attn.qkv",
    "blocks.{i}.proj": "blocks.{i}.attn.proj",
    "blocks.{i}.scale1": "blocks.{i}.ls1.gamma",
    "blocks.{i}.norm2": "blocks.{i}.norm2",
    "blocks.{i}.mlp.fc1": "blocks.{i}.mlp.fc1",
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
_TIMM_DISTILLED: Names = _TIMM | {"registers": "dist_token", "head.distilled": "head_dist"}


def timm_layout(names: Iterable[str]) -> Layout:
    """The layout of timm's VisionTransformer, with or without a distillation token."""
    distilled = any(name.endswith("dist_token") for name in names)
    return Layout(
        _TIMM_DISTILLED if distilled else _TIMM, ("timm_model.",), (r"mask_token", r"decoder_.+")
    )


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
