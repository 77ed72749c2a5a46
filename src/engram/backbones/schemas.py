"""Schemas of all configurations that are read, and the limits of a backbone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from engram.images.preprocessing import MAX_SIDE
from engram.images.preprocessing import SCHEMA as PREPROCESSING
from engram.util.schema import (
    AnyOf,
    Array,
    Boolean,
    Integer,
    Invalid,
    Nullable,
    Number,
    Object,
    Rule,
    String,
)
from engram.vit.layers import Activation, Norm, Pooling, Positions

#: The most patches, each of them a token, that an image may be cut into, such as 64 x 128. A token
#: reads all others, so images of twice the side take 16 times as long.
MAX_PATCHES = 8_192

SIZE = Array(Integer(1, MAX_SIDE), 2, 2)  # height and width in pixels
WIDTH = Integer(1, 65_536)
EPS = Number(1e-15, 1)

#: The sizes of a backbone that an engram records.
SHAPE: dict[str, Rule] = {
    "image_size": SIZE,
    "patch": Integer(1, 1_024),
    "width": WIDTH,
    "depth": Integer(1, 1_000),
    "mlp_width": Integer(1, 1_000_000),
    "activation": String(choices=get_args(Activation)),
    "class_token": Boolean(),
}
HEADS = Integer(1, 65_536)
PREFIX = Integer(0, 10_000)

_HEAD = Object(
    {"classes": Integer(0, 10_000_000)},
    {
        "pooling": String(choices=get_args(Pooling)),
        **dict.fromkeys(("bias", "hidden", "norm", "raw", "pool_query"), Boolean()),
        "pool_heads": Nullable(HEADS),
        "pool_mlp_width": Nullable(Integer(0, 1_000_000)),
    },
)
_ANGLE = Number(-1e6, 1e6)
_ROTARY = Object(
    {"base": Number(1, 1e9), "span": _ANGLE},
    {
        **dict.fromkeys(("start", "offset"), _ANGLE),
        **dict.fromkeys(("halves", "columns_first"), Boolean()),
    },
)
_SWITCHES = (
    *("patch_bias", "qkv_bias", "proj_bias", "mlp_bias", "patch_norm", "pre_norm", "read_norm"),
    *("mlp_norm", "layer_scale", "final_norm", "antialias", "class_token"),
)
#: The fields of `ViTConfig`, as `save_backbone` writes them.
CONFIG = Object(
    {**{name: SHAPE[name] for name in ("image_size", "patch", "width", "depth", "mlp_width")},
     "heads": HEADS},
    {
        "eps": EPS,
        "activation": SHAPE["activation"],
        "registers": PREFIX,
        "prefix_positions": PREFIX,
        "norm": String(choices=get_args(Norm)),
        "positions": String(choices=get_args(Positions)),
        "rotary": Nullable(_ROTARY),
        "head": Nullable(_HEAD),
        **dict.fromkeys(_SWITCHES, Boolean()),
    },
)  # fmt: skip


def can_be_cut(size: Sequence[int], patch: int) -> bool:
    """Whether images of this height and width are whole patches, and not too many."""
    try:
        SIZE.check(size, "size")
    except Invalid:
        return False
    height, width = size
    if height % patch or width % patch:
        return False
    return (height // patch) * (width // patch) <= MAX_PATCHES


# What is read of the configurations of other libraries. Their other settings may be anything.

_FLAG = Nullable(Boolean())
_TEXT = Nullable(String())
_COUNT = Integer(1, 1_000_000)
_COUNTS = AnyOf((_COUNT, Array(_COUNT, 2, 2)), "one or two whole numbers")
_SIDES = Nullable(AnyOf((SIZE.item, SIZE), f"one or two whole numbers from 1 to {MAX_SIDE:,}"))
_SIZES = Object({}, dict.fromkeys(("height", "width", "shortest_edge"), Nullable(SIZE.item)), True)
_PROCESSOR_SIZE = AnyOf(
    (_SIDES, _SIZES), f"a size in pixels, from 1 to {MAX_SIDE:,}, or an object with such sizes"
)
_MEAN, _STD = (Nullable(PREPROCESSING.optional[name]) for name in ("mean", "std"))

TRANSFORMERS = Object(
    {},
    {
        "hidden_act": String(),
        "layer_norm_eps": EPS,
        "rms_norm_eps": EPS,
        "rope_theta": Number(1, 1e9),
        "is_native": Boolean(),
        "num_attention_heads": HEADS,
        "image_size": AnyOf((SIZE.item, SIZE), f"whole numbers from 1 to {MAX_SIDE:,}"),
        "patch_size": _COUNTS,
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "intermediate_size"), _COUNT),
    },
    others=True,
)
PROCESSOR = Object(
    {},
    {
        "size": _PROCESSOR_SIZE,
        "crop_size": _PROCESSOR_SIZE,
        "image_mean": _MEAN,
        "image_std": _STD,
        "rescale_factor": Number(0, 1e4),
        "resample": Nullable(Integer(0, 100)),
        **dict.fromkeys(("do_rescale", "do_normalize", "do_center_crop"), _FLAG),
    },
    others=True,
)
TIMM = Object(
    {},
    {
        "input_size": Nullable(Array(SIZE.item, 3, 3)),
        "crop_pct": Nullable(Number(0, 10)),
        "mean": _MEAN,
        "std": _STD,
        **dict.fromkeys(
            ("architecture", "tag", "crop_mode", "interpolation", "global_pool"), _TEXT
        ),
    },
    others=True,
)
TIMM_ARGUMENTS = Object(
    {},
    {
        **dict.fromkeys(("num_heads", "attn_pool_num_heads"), Nullable(HEADS)),
        "ref_feat_shape": Nullable(_COUNTS),
        "act_layer": _TEXT,
        "global_pool": _TEXT,
    },
    others=True,
)
