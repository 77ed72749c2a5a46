"""Tensor names of each library as tables, and tensors translated by them into our names.

A table maps our module to theirs. `{i}` is the number of a layer, a tuple is concatenated along the
rows (three projections become one `qkv`), and `weight` and `bias` follow their module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.util.text import join_names

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
    family, names = FAMILIES[kind], list(names)
    classifier = any(name.startswith("classifier.") for name in names)
    gated = any(".mlp.gate_proj." in name for name in names)
    required: tuple[str, ...] = ("class_token",)
    ignored: tuple[str, ...] = _NOT_IN_BACKBONE
    table = _VIT
    if family == "deit":
        teacher = any(name.startswith("cls_classifier.") for name in names)
        table = _DEIT_TEACHER if teacher else _DEIT
        required += ("registers",)
    elif family == "dinov2":
        swiglu = any(".mlp.weights_in." in name for name in names)
        table = _DINOV2_SWIGLU if swiglu else _DINOV2_GATED if gated else _DINOV2
        required += ("blocks.0.scale1", "blocks.0.scale2")
        required += ("registers",) if kind == "dinov2_with_registers" else ()
    elif family == "dinov3":
        table = _DINOV3_GATED if gated else _DINOV3
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


# Translation

_LAYER = re.compile(r"(?<=[._])\d+(?=[./])")
_SUFFIXES = {
    ".weight": ".weight",
    ".bias": ".bias",
    "/kernel": ".weight",
    "/scale": ".weight",
    "/bias": ".bias",
}


@dataclass(frozen=True)
class Translated:
    """The tensors of a file under our names."""

    tensors: dict[str, Tensor]  # fp32
    missing: Sequence[str] = ()  # parts of concatenated tensors that the file lacks
    surplus: Sequence[str] = ()  # neither in the layout's table nor ignored by it

    def has(self, stem: str) -> bool:
        """Whether there is a tensor of this name, or any of this module."""
        return any(name == stem or name.startswith(f"{stem}.") for name in self.tensors)


def translate(
    tensors: Mapping[str, Tensor], layout: Layout, source: str, share: bool = False
) -> Translated:
    """Their tensors under our names. A tensor without finite numbers is an EngramError.

    With `share`, what is one fp32 tensor there and here keeps its storage; otherwise all are
    copies.
    """
    stems = {}  # their name -> ours, and which part of a concatenation it is
    for ours, theirs in layout.names.items():
        parts = (theirs,) if isinstance(theirs, str) else theirs
        stems.update({stem: (ours, part) for part, stem in enumerate(parts)})
    found: dict[str, dict[int, Tensor]] = {}
    surplus = []
    for full, tensor in tensors.items():
        prefix = next((p for p in layout.prefixes if full.startswith(p)), "")
        name = full.removeprefix(prefix)
        if any(re.fullmatch(pattern, name) for pattern in layout.ignored):
            continue
        match = _our_name(name, stems)
        if match is None:
            surplus.append(full)
        else:
            found.setdefault(match[0], {})[match[1]] = to_fp32(full, tensor, source, share)
    if not any(piece.numel() for piece in found.get("registers", {}).values()):
        found.pop("registers", None)  # DINOv3 without registers has a tensor for none
    for ours in [name for name in found if layout.zero_biases and name.endswith(".qkv.weight")]:
        biases = found.setdefault(f"{ours.removesuffix('weight')}bias", {})
        for part, weight in found[ours].items():
            biases.setdefault(part, weight.new_zeros(weight.shape[:1]))
    joined = {}
    missing = []
    for ours, pieces in found.items():
        names = their_names(ours, layout)
        missing += [name for part, name in enumerate(names) if part not in pieces]
        if len(pieces) == len(names):
            joined[ours] = _join(ours, [pieces[part] for part in sorted(pieces)], names, source)
    return Translated(joined, missing, surplus)


def _our_name(name: str, stems: Mapping[str, tuple[str, int]]) -> tuple[str, int] | None:
    """Our name of one of their tensors, and which part of it that is; None if it is unknown."""
    layer = _LAYER.search(name)
    stem = name if layer is None else _LAYER.sub("{i}", name, count=1)
    suffix = next((end for end in _SUFFIXES if stem.endswith(end)), "")
    if stem in stems:  # a tensor that is no weight or bias of a module
        (ours, part), suffix = stems[stem], ""
    elif suffix and stem.removesuffix(suffix) in stems:
        (ours, part), suffix = stems[stem.removesuffix(suffix)], _SUFFIXES[suffix]
    else:
        return None
    return ours.replace("{i}", layer[0] if layer else "") + suffix, part


def to_fp32(name: str, tensor: Tensor, source: str, share: bool = False) -> Tensor:
    """Cast a tensor to fp32, after checking that its numbers are finite.

    It is a copy, so that nothing refers to the file any more; with `share`, only if it has to be.
    """
    if tensor.is_meta:
        raise EngramError(
            f"The tensor {name} of {source} has no values yet (it is on the device meta); load "
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
        raise EngramError(f"Tensors of {source} that form one tensor differ in shape: {shapes}.")
    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if ours in ("class_token", "registers", "position") and tensor.numel() and tensor.ndim:
        tensor = tensor.reshape(-1, tensor.shape[-1])  # (1, n, D), (n, D) or (D) -> (n, D)
    return tensor


def their_names(ours: str, layout: Layout) -> list[str]:
    """The name of one of our tensors in a file; several where it is a concatenation."""
    layer = _LAYER.search(ours)
    stem, number = (ours, "") if layer is None else (_LAYER.sub("{i}", ours, count=1), layer[0])
    kind = ""
    if stem not in layout.names:
        module, _, last = stem.rpartition(".")
        if module not in layout.names:
            return [ours]
        kind = f".{last}"
        if layout is GOOGLE:
            kind = "/bias" if last == "bias" else "/scale" if "norm" in module else "/kernel"
        stem = module
    theirs = layout.names[stem]
    parts = (theirs,) if isinstance(theirs, str) else theirs
    return [part.replace("{i}", number) + kind for part in parts]


def check_complete(name: str, missing: Sequence[str], surplus: Sequence[str]) -> None:
    """Refuse a model with missing or surplus tensors."""
    if missing or surplus:
        lacks = f"lacks the tensors {join_names(missing)}" if missing else ""
        has = f"has tensors that no plain ViT has: {join_names(surplus)}" if surplus else ""
        raise EngramError(f"{name} {' and '.join(part for part in (lacks, has) if part)}.")
