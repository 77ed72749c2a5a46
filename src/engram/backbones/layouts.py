"""Names of a ViT's tensors in the files of other libraries, by which `translate.py` gives ours.

A table maps our module to theirs. A name with a `+` is several of theirs, concatenated along the
rows (three projections become one `qkv`); where there are several names, a file has one of them.
`weight` and `bias` follow their module. What is in a layer or in a head has the same table for all
libraries: no two mean different things by one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: Our modules, and what they are called.
Table = dict[str, str | tuple[str, ...]]
#: The number of a layer in a name, which is `{i}` in tables.
LAYER = re.compile(r"(?<=[._])\d+(?=[./])")

_VIT: Table = {
    "patch": "embeddings.patch_embeddings.projection",
    "class_token": "embeddings.cls_token",
    "position": "embeddings.position_embeddings",
    "norm": "layernorm",
}
_TOWER: Table = {
    "patch": "embeddings.patch_embedding",
    "class_token": "embeddings.class_embedding",
    "position": "embeddings.position_embedding.weight",
    "pre_norm": "pre_layrnorm",  # their spelling
    "norm": "post_layernorm",
}
#: What is neither in a layer nor in a head, by family.
_ROOTS: dict[str, Table] = {
    "timm": {
        "patch": "patch_embed.proj",
        "class_token": "cls_token",
        "registers": ("reg_token", "dist_token", "storage_tokens"),  # the last: Meta's DINOv3
        "position": "pos_embed",
        "patch_norm": "patch_embed.norm",
        "pre_norm": "norm_pre",
        "norm": "norm",
    },
    "google": {
        "patch": "embedding",
        "class_token": "cls",
        "position": "Transformer/posembed_input/pos_embedding",
        "norm": "Transformer/encoder_norm",
    },
    # transformers
    "vit": _VIT,
    "deit": {**_VIT, "registers": "embeddings.distillation_token"},
    "dinov2": {**_VIT, "registers": "embeddings.register_tokens"},
    "dinov3": {
        "patch": "embeddings.patch_embeddings",
        "class_token": "embeddings.cls_token",
        "registers": "embeddings.register_tokens",
        "norm": "norm",
    },
    "clip": _TOWER,
    "siglip": _TOWER,
    "aimv2": {  # the second names: the files that Apple published first
        "patch": ("embeddings.patch_embed", "preprocessor.patchifier.proj"),
        "patch_norm": ("embeddings.rms_norm", "preprocessor.patchifier.norm"),
        "position": ("embeddings.position_embedding.weight", "preprocessor.pos_embed"),
        "norm": ("rms_norm", "backbone.post_backbone_norm"),
    },
}
#: Where layers are, and what is in one.
_LAYERS = (
    "blocks.{i}.",
    "encoder.layer.{i}.",
    "encoder.layers.{i}.",
    "layer.{i}.",
    "layers.{i}.",
    "backbone.blocks.{i}.",
    "Transformer/encoderblock_{i}/",
)
_LAYER: Table = {
    "norm1": ("norm1", "layernorm_before", "layer_norm1", "rms_norm1", "norm_1", "LayerNorm_0"),
    "qkv": (
        "attn.qkv",
        "attn.q_proj+attn.k_proj+attn.v_proj",
        "attention.attention.query+attention.attention.key+attention.attention.value",
        "attention.q_proj+attention.k_proj+attention.v_proj",
        "self_attn.q_proj+self_attn.k_proj+self_attn.v_proj",
        "MultiHeadDotProductAttention_1/query+MultiHeadDotProductAttention_1/key"
        "+MultiHeadDotProductAttention_1/value",
    ),
    "read_norm": "attn.norm",
    "proj": (
        *("attn.proj", "attention.output.dense", "attention.o_proj", "attention.out_proj"),
        *("self_attn.out_proj", "MultiHeadDotProductAttention_1/out"),
    ),
    "scale1": ("ls1.gamma", "gamma_1", "layer_scale1.lambda1"),
    "norm2": ("norm2", "layernorm_after", "layer_norm2", "rms_norm2", "norm_2", "LayerNorm_2"),
    "mlp.fc1": (  # first what is gated: other files have one of the two names alone
        *("mlp.fc1_g+mlp.fc1_x", "mlp.gate_proj+mlp.up_proj", "ffn.gate_proj+ffn.up_proj"),
        *("mlp.w1+mlp.w2", "mlp.fc1+mlp.fc3"),
        *("mlp.fc1", "intermediate.dense", "mlp.weights_in", "mlp.up_proj", "MlpBlock_3/Dense_0"),
    ),
    "mlp.norm": "mlp.norm",
    "mlp.fc2": (
        *("mlp.fc2", "output.dense", "mlp.weights_out", "mlp.down_proj", "ffn.down_proj"),
        *("mlp.w3", "MlpBlock_3/Dense_1"),
    ),
    "scale2": ("ls2.gamma", "gamma_2", "layer_scale2.lambda1"),
}
_HEAD: Table = {
    "head.pool.probe": ("attn_pool.latent", "head.probe", "head.cls_token"),
    "head.pool.q": ("attn_pool.q", "head.attention.q"),  # `split_and_join` makes it
    "head.pool.kv": ("attn_pool.kv", "head.attention.kv", "head.k_proj+head.v_proj"),
    "head.pool.proj": ("attn_pool.proj", "head.attention.out_proj", "head.output_proj"),
    "head.pool.norm": ("attn_pool.norm", "head.layernorm"),
    "head.pool.mlp.fc1": ("attn_pool.mlp.fc1", "head.mlp.fc1"),
    "head.pool.mlp.fc2": ("attn_pool.mlp.fc2", "head.mlp.fc2"),
    "head.norm": "fc_norm",
    "head.hidden": ("pre_logits.fc", "pre_logits"),
    "head.linear": ("head", "classifier", "cls_classifier", "visual_projection"),
    "head.distilled": ("head_dist", "distillation_classifier"),
}
_PREFIXES = (
    *("vit.", "deit.", "dinov2.", "dinov2_with_registers.", "vision_model.", "model."),
    *("timm_model.", "opt/target/"),
)
_NOT_IN_BACKBONE: tuple[str, ...] = (
    r"pooler\.dense\..+",  # a tanh layer that transformers adds; no classifier reads it
    r"(embeddings\.)?(mask_token|position_ids)",
    r"decoder(\.|_).+",  # of masked image modelling
    r"text_model\..+|text_projection\..+|logit_scale|logit_bias",
    r"rope_embed\.periods|.+\.bias_mask|local_cls_norm\..+",  # of Meta's DINOv3
)

#: model_type in a config.json of transformers -> family
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
_SCALES = ("blocks.0.scale1", "blocks.0.scale2")
#: What every file has to have, beside what every ViT has.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "google": ("class_token",),
    "vit": ("class_token",),
    "deit": ("class_token", "registers"),
    "dinov2": ("class_token", *_SCALES),
    "dinov2_with_registers": ("class_token", *_SCALES, "registers"),
    "dinov3": ("class_token", *_SCALES),
    "clip": ("class_token", "pre_norm.weight"),
    "aimv2": ("patch_norm.weight",),
}


@dataclass(frozen=True)
class Layout:
    """Tensor names of one file."""

    names: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = _NOT_IN_BACKBONE  # patterns of what is not part of the backbone
    required: tuple[str, ...] = ()  # optional in a ViT, but not in this family
    zero_biases: bool = False  # queries, keys or values without a bias have one of zeros
    kernels: bool = False  # a weight is called kernel, or scale in a norm

    def their_names(self, ours: str) -> list[str]:
        """The name of one of our tensors in the file; several where it is a concatenation."""
        layer = LAYER.search(ours)
        stem, number = (ours, "") if layer is None else (LAYER.sub("{i}", ours, count=1), layer[0])
        kind = ""
        if stem not in self.names:
            stem, _, last = stem.rpartition(".")
            if stem not in self.names:
                return [ours]
            kind = f".{last}"
            if self.kernels:
                kind = "/bias" if last == "bias" else "/scale" if "norm" in stem else "/kernel"
        return [part.replace("{i}", number) + kind for part in self.names[stem]]


def find_layout(kind: str, tensors: Iterable[str]) -> Layout:
    """The layout of tensors of these names: of timm, of google, or of a transformers model_type."""
    family, known = FAMILIES.get(kind, kind), set()
    for name in tensors:
        stem = LAYER.sub("{i}", without_prefix(name), count=1)
        known |= {stem, re.sub(r"[./](weight|bias|kernel|scale)$", "", stem)}
    at = next((one for one in _LAYERS if any(name.startswith(one) for name in known)), _LAYERS[0])
    names = {}
    for ours, before, table in (("", "", _ROOTS[family] | _HEAD), ("blocks.{i}.", at, _LAYER)):
        for module, choices in table.items():
            every = (choices,) if isinstance(choices, str) else choices
            parts = [tuple(before + one for one in choice.split("+")) for choice in every]
            whole = [one for one in parts if known.issuperset(one)]
            some = [one for one in parts if not known.isdisjoint(one)]
            if not some:  # an error should name what the file would have called it
                beside = [(one, one[0].rpartition(".")[0] + ".") for one in parts]
                some = [one for one, at in beside if any(name.startswith(at) for name in known)]
            names[ours + module] = (whole or some or parts)[0]
    ignored, rotary = _NOT_IN_BACKBONE, family == "dinov3"
    if family == "timm":
        rotary = "pos_embed" not in known or len(names["blocks.{i}.qkv"]) > 1
    if family == "siglip" and names["head.linear"] == ("classifier",):
        ignored += (r"head\..+",)  # it reads the mean of the tokens: the pooling is unused
    required = _REQUIRED.get(kind) or _REQUIRED.get(family, ())
    return Layout(names, ignored, required, rotary, kernels=family == "google")


def without_prefix(name: str) -> str:
    """A tensor's name without that of the model which the ViT is a part of."""
    return name.removeprefix(next((one for one in _PREFIXES if name.startswith(one)), ""))


def split_and_join(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split and join tensors whose parts are not ours.

    SigLIP's pooling has one `in_proj`, which becomes q and kv. In timm's Eva, keys have no bias:
    they get zeros. So they do in Meta's files of DINOv3, where a mask sets what is there to zero.
    """
    out = dict(tensors)
    for name, tensor in tensors.items():
        in_proj = re.fullmatch(r"((?:.+\.)?head\.attention\.)in_proj_(weight|bias)", name)
        stem = name.removesuffix("q_bias")
        if in_proj and not tensor.shape[0] % 3:
            rows = tensor.shape[0] // 3
            out[f"{in_proj[1]}q.{in_proj[2]}"] = tensor[:rows]
            out[f"{in_proj[1]}kv.{in_proj[2]}"] = out.pop(name)[rows:]
        elif name.endswith(".attn.q_bias") and f"{stem}v_bias" in tensors:
            q, v = out.pop(name), out.pop(f"{stem}v_bias")
            out[f"{stem}qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
        elif name.endswith(".attn.qkv.bias") and "storage_tokens" in tensors:
            q, k, v = tensor.chunk(3)
            out[name] = torch.cat([q, torch.zeros_like(k), v])
    return out


def google_to_torch(name: str, array: Tensor) -> Tensor:
    """One of Google's tensors with the axes that torch uses. The values do not change."""
    if array.ndim == 4:  # (rows, columns, in, out) -> (out, in, rows, columns)
        return array.permute(3, 2, 0, 1)
    if re.search(r"/(query|key|value)/", name):  # (D, h, d) -> (h d, D), and (h, d) -> (h d)
        return array.flatten(1).T if name.endswith("kernel") else array.flatten()
    if name.endswith("/out/kernel"):  # (h, d, D) -> (D, h d)
        return array.flatten(0, -2).T
    return array.T if name.endswith("kernel") else array
