"""Whose tensors are called what: one table per layout, and what is left out on purpose.

A table reads "our module: theirs". `{i}` is the number of a layer, a tuple is joined along the
rows (three projections become one `qkv`), and `weight` and `bias` go along with their module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.errors import EngramError

Names = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    names: Names
    prefixes: tuple[str, ...] = ()  # taken off where a file has them
    left_out: tuple[str, ...] = ()  # patterns of tensors that are no part of the trunk
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
_DINOV2_GATED: Names = _DINOV2 | {  # the same, as objects of transformers 5 have it
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
    "head.pool.q": "head.attention.q",  # `split_in_proj` makes these two of their one
    "head.pool.kv": "head.attention.kv",
    "head.pool.proj": "head.attention.out_proj",
    "head.pool.norm": "head.layernorm",
    "head.pool.mlp.fc1": "head.mlp.fc1",
    "head.pool.mlp.fc2": "head.mlp.fc2",
}
_CLASSIFIER: Names = {"head.linear": "classifier"}  # takes the place of a projection or a pooling

_NO_TRUNK = (
    r"pooler\.dense\..+",  # a tanh layer for sentence-like tasks; no classifier reads it
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
    """The table of a model_type of transformers; variants are told apart by the names."""
    family = FAMILIES[kind]
    names = set(names)
    classifier = any(name.startswith("classifier.") for name in names)
    required: tuple[str, ...] = ("class_token",)
    left_out: tuple[str, ...] = _NO_TRUNK
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
        # Its classifier reads the mean of the tokens; the attention pooling lies idle in the file.
        table = _TOWER | _CLASSIFIER if classifier else _SIGLIP
        left_out += (r"head\..+",) if classifier else ()
        required = ()
    return Layout(table, _PREFIXES, left_out, required)


# What objects of transformers 5 call otherwise than the files that it reads and writes.
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
    """The state_dict of an object of transformers, old or new, under the names of its files."""
    renamed = _RENAMED if FAMILIES[kind] in ("vit", "deit", "dinov2") else ()
    out = {}
    for name, tensor in tensors.items():
        for pattern, instead in renamed:
            name = re.sub(pattern, instead, name)
        out[name] = tensor
    return out


def split_in_proj(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """SigLIP's pooling keeps query, key and value in one `in_proj`: its query is another input."""
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
    distilled = any(name.endswith("dist_token") for name in names)
    return Layout(
        _TIMM_DISTILLED if distilled else _TIMM, ("timm_model.",), (r"mask_token", r"decoder_.+")
    )


# Google's JAX checkpoints: kernels lie the other way round, attention keeps its heads apart

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
    """A tensor of Google's in the axes that torch uses. Values stay as they are, bit for bit."""
    if array.ndim == 4:  # (rows, columns, in, out) -> (out, in, rows, columns)
        return array.permute(3, 2, 0, 1)
    if re.search(r"/(query|key|value)/", name):  # (D, h, d) -> (h d, D), and (h, d) -> (h d)
        return array.flatten(1).T if name.endswith("kernel") else array.flatten()
    if name.endswith("/out/kernel"):  # (h, d, D) -> (D, h d)
        return array.flatten(0, -2).T
    return array.T if name.endswith("kernel") else array


# From a file's names to ours

_LAYER = re.compile(r"(?<=[._])\d+(?=[./])")
_KINDS = {
    ".weight": ".weight",
    ".bias": ".bias",
    "/kernel": ".weight",
    "/scale": ".weight",
    "/bias": ".bias",
}


@dataclass(frozen=True)
class Translated:
    tensors: dict[str, Tensor]  # ours, fp32
    missing: list[str]  # parts of a join that the file lacks
    surplus: list[str]  # neither in the table nor left out on purpose

    def has(self, stem: str) -> bool:
        """Whether there is this tensor, or any of this module."""
        return any(name == stem or name.startswith(f"{stem}.") for name in self.tensors)


def translate(
    tensors: Mapping[str, Tensor], layout: Layout, source: str, share: bool = False
) -> Translated:
    """Their tensors under our names. Refuses one that holds no finite floating-point numbers.

    With `share`, what is one fp32 tensor there and here keeps its storage; else all are copies.
    """
    places = {}
    for ours, theirs in layout.names.items():
        parts = (theirs,) if isinstance(theirs, str) else theirs
        places.update({stem: (ours, part) for part, stem in enumerate(parts)})
    found: dict[str, dict[int, Tensor]] = {}
    surplus = []
    for full, tensor in tensors.items():
        prefix = next((p for p in layout.prefixes if full.startswith(p)), "")
        name = full.removeprefix(prefix)
        if any(re.fullmatch(pattern, name) for pattern in layout.left_out):
            continue
        layer = _LAYER.search(name)
        stem = name if layer is None else _LAYER.sub("{i}", name, count=1)
        kind = next((end for end in _KINDS if stem.endswith(end)), "")
        place = places.get(stem)
        if place is None and kind:
            place, kind = places.get(stem.removesuffix(kind)), _KINDS[kind]
        else:
            kind = ""
        if place is None:
            surplus.append(full)
            continue
        ours = place[0].replace("{i}", layer[0] if layer else "") + kind
        found.setdefault(ours, {})[place[1]] = checked(full, tensor, source, share)
    joined = {}
    missing = []
    for ours, pieces in found.items():
        names = their_names(ours, layout)
        missing += [name for part, name in enumerate(names) if part not in pieces]
        if len(pieces) == len(names):
            joined[ours] = _join(ours, [pieces[part] for part in sorted(pieces)], names, source)
    return Translated(joined, missing, surplus)


def checked(name: str, tensor: Tensor, source: str, share: bool = False) -> Tensor:
    """A copy in fp32, so that nothing refers to the file any more; with `share`, if it has to be.

    Finite numbers are checked either way.
    """
    if tensor.is_meta:
        raise EngramError(
            f"The tensor {name} of {source} has no numbers yet (it is on the device meta); load "
            "its weights first."
        )
    if not tensor.is_floating_point():
        raise EngramError(
            f"The tensor {name} of {source} holds {tensor.dtype} numbers, not floating-point "
            "ones; quantised weights cannot be read."
        )
    tensor = tensor.detach().to(torch.float32, copy=not share).contiguous()
    if not torch.isfinite(tensor).all():
        raise EngramError(
            f"The tensor {name} of {source} holds NaN or infinite numbers; the file is damaged or "
            "its training went wrong."
        )
    return tensor


def _join(ours: str, pieces: list[Tensor], names: list[str], source: str) -> Tensor:
    if len({piece.shape for piece in pieces}) > 1:
        shapes = ", ".join(f"{n} {tuple(p.shape)}" for n, p in zip(names, pieces, strict=True))
        raise EngramError(f"Tensors of {source} that belong together differ in shape: {shapes}.")
    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if ours in ("class_token", "registers", "position") and tensor.numel() and tensor.ndim:
        # (1, n, D), (n, D) or (D) -> (n, D)
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor


def their_names(ours: str, layout: Layout) -> list[str]:
    """What a tensor of ours is called in a file; more than one name where several are joined."""
    if not layout.names:
        return [ours]
    layer = _LAYER.search(ours)
    stem, number = (ours, "") if layer is None else (_LAYER.sub("{i}", ours, count=1), layer[0])
    theirs = layout.names.get(stem)
    kind = ""
    if theirs is None:
        stem, _, kind = stem.rpartition(".")
        theirs = layout.names.get(stem, ours)
    parts = (theirs,) if isinstance(theirs, str) else theirs
    if layout is GOOGLE and kind:
        kind = "/bias" if kind == "bias" else "/scale" if "norm" in stem else "/kernel"
    elif kind:
        kind = f".{kind}"
    return [part.replace("{i}", number) + kind for part in parts]
