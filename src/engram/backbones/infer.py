"""What the shapes of a ViT's tensors show of its architecture.

Width, depth, patch size, position embeddings, registers, LayerScale and the head are in the
shapes. The rest comes from `ModelSettings`, and where neither knows the number of heads, from the
width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from engram.backbones.configs import READABLE, ModelSettings
from engram.backbones.layouts import Layout
from engram.backbones.translate import Translated, their_names
from engram.errors import EngramError
from engram.util.text import join_names
from engram.vit.vit import HeadConfig, ViTConfig

# Every ViT has these tensors. Number of axes of each.
_AXES = {
    "patch.weight": 4,
    "blocks.0.qkv.weight": 2,
    "blocks.0.mlp.fc1.weight": 2,
    "blocks.0.mlp.fc2.weight": 2,
}
_OPTIONAL_AXES = {"class_token": 2, "registers": 2, "position": 2}
#: Height and width of a backbone without position embeddings: its tensors fit images of any size.
_ANY_SIZE = 224


def infer_config(
    found: Translated, layout: Layout, settings: ModelSettings, name: str
) -> ViTConfig:
    """The architecture of a model. Tensors that no plain ViT has are an EngramError."""
    tensors = found.tensors
    _check_present(found, layout, settings, name)
    _check_shapes(tensors, layout, name)
    width, _, patch, _ = tensors["patch.weight"].shape
    mlp_width = tensors["blocks.0.mlp.fc2.weight"].shape[1]
    swiglu = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * mlp_width
    class_token = "class_token" in tensors
    registers = len(tensors["registers"]) if "registers" in tensors else 0
    prefix = int(class_token) + registers
    grid, prefix_positions = (_ANY_SIZE // patch, _ANY_SIZE // patch), 0
    if settings.positions == "learned":
        positions = len(tensors["position"])
        grid = _infer_grid(positions, patch, (prefix, int(class_token), 0), settings, name)
        prefix_positions = positions - grid[0] * grid[1]
    bare = settings.norm == "rms"  # AIMv2, which has few biases

    def has_bias(module: str) -> bool:
        return not bare or any(n.endswith(f"{module}.bias") for n in tensors if n[:5] != "head.")

    config = ViTConfig(
        image_size=(grid[0] * patch, grid[1] * patch),
        patch=patch,
        width=width,
        depth=len({n.split(".")[1] for n in tensors if n.startswith("blocks.")}),
        heads=settings.heads or usual_heads(width, swiglu),
        mlp_width=mlp_width,
        eps=settings.eps,
        activation="swiglu" if swiglu else settings.activation,
        class_token=class_token,
        registers=registers,
        prefix_positions=prefix_positions if prefix_positions == prefix else 0,
        patch_bias=not found.has("pre_norm"),
        qkv_bias=any(n.endswith("qkv.bias") for n in tensors),
        proj_bias=has_bias(".proj"),
        mlp_bias=has_bias(".fc1"),
        norm=settings.norm,
        patch_norm=found.has("patch_norm"),
        pre_norm=found.has("pre_norm"),
        read_norm=found.has("blocks.0.read_norm"),
        mlp_norm=found.has("blocks.0.mlp.norm"),
        layer_scale=any(n.endswith(("scale1", "scale2")) for n in tensors),
        final_norm=not found.has("head.norm"),
        positions=settings.positions,
        rotary=settings.rotary,
        antialias=settings.antialias,
        head=_infer_head(found, settings),
    )
    _check_declared(config, settings, name)
    return config


def split_positions(
    tensors: Mapping[str, Tensor], config: ViTConfig, share: bool
) -> dict[str, Tensor]:
    """The same tensors, with the position embeddings of patches apart from those of other tokens.

    Files keep both in one tensor. A class token that has a position while the registers have none
    (DINOv2 in transformers) gets it added, as timm does, so that the same weights are the same
    backbone in both layouts. With `share`, both parts keep the storage of the original.
    """
    if config.positions != "learned":
        return dict(tensors)
    positions = tensors["position"]
    count = len(positions) - config.grid[0] * config.grid[1]
    if not count:
        return dict(tensors)
    prefix, patches = positions[:count], positions[count:]
    if not share:
        prefix, patches = prefix.clone(), patches.clone()
    if config.prefix_positions:
        return {**tensors, "prefix_position": prefix, "position": patches}
    return {**tensors, "class_token": tensors["class_token"] + prefix, "position": patches}


def usual_heads(width: int, swiglu: bool) -> int:
    """The number of heads of a published ViT of this width: 64 wide each, but 16 in large ones.

    DINOv3 and AIMv2 have others, which `configs` knows.
    """
    if width in (1152, 1280, 1408, 1664) or (width == 1536 and not swiglu):
        return 16
    return max(width // 64, 1)


def _infer_grid(
    count: int, patch: int, others: tuple[int, ...], settings: ModelSettings, name: str
) -> tuple[int, int]:
    """Rows and columns of patches, from the number of position embeddings.

    `others` are the numbers of them that may belong to tokens which are not patches.
    """
    if settings.image_size is not None:
        grid = settings.image_size[0] // patch, settings.image_size[1] // patch
        if count - grid[0] * grid[1] in others:
            return grid
        size = f"{settings.image_size[0]} x {settings.image_size[1]}"
    else:
        for other in others:
            side = math.isqrt(max(count - other, 0))
            if side and side * side == count - other:
                return side, side
        size = "square"
    raise EngramError(
        f"{name} has {count} position embeddings, which do not fit {size} images in patches of "
        f"{patch} pixels with {others[0]} further tokens."
    )


def _infer_head(found: Translated, settings: ModelSettings) -> HeadConfig | None:
    """The head that the file has tensors for."""
    if not found.has("head"):
        return None
    tensors = found.tensors
    rows = [t.shape[0] for n, t in tensors.items() if n.startswith("head.linear.") and t.ndim]
    hidden = 0 if settings.plain_pool else None  # None: as in the layers
    if "head.pool.mlp.fc1.weight" in tensors:
        own = tensors["head.pool.mlp.fc1.weight"].shape[0]
        hidden = own if own != tensors["blocks.0.mlp.fc2.weight"].shape[1] else None
    return HeadConfig(
        classes=max(rows, default=0),
        pooling=settings.pooling,
        bias=settings.head_bias,
        hidden=found.has("head.hidden"),
        norm=found.has("head.norm"),
        raw=settings.raw,
        pool_heads=settings.pool_heads,
        pool_mlp_width=hidden,
        pool_query=not settings.plain_pool,
    )


# What does not fit


def _check_present(found: Translated, layout: Layout, settings: ModelSettings, name: str) -> None:
    positions = ("position",) if settings.positions == "learned" else ()
    needed = (*_AXES, *positions, *layout.required)
    missing = [
        theirs for n in needed if n not in found.tensors for theirs in their_names(n, layout)
    ]
    if missing:
        also = f" and has {join_names(found.surplus)}" if found.surplus else ""
        raise EngramError(
            f"{name} is damaged, or no plain ViT that can be a backbone ({READABLE} can): it lacks "
            f"{join_names(missing)}{also}."
        )


def _check_shapes(tensors: Mapping[str, Tensor], layout: Layout, name: str) -> None:
    width = tensors["patch.weight"].shape[:1]
    for n, axes in (_AXES | _OPTIONAL_AXES).items():
        if n not in tensors:
            continue
        tensor = tensors[n]
        in_width = tensor.shape[-1:] == width or n in ("patch.weight", "blocks.0.mlp.fc2.weight")
        if tensor.ndim != axes or not tensor.numel() or not in_width:
            raise EngramError(
                f"The tensor {their_names(n, layout)[0]} of {name} has the shape "
                f"{tuple(tensor.shape)}, which does not fit the others."
            )
    _, channels, rows, columns = tensors["patch.weight"].shape
    if channels != 3 or rows != columns:
        raise EngramError(
            f"{name} has patches of {rows} x {columns} pixels with {channels} channels; square "
            "patches with 3 channels were expected."
        )


def _check_declared(config: ViTConfig, settings: ModelSettings, name: str) -> None:
    for key, value in settings.declared.items():
        if getattr(config, key) != value:
            raise EngramError(
                f"The config.json of {name} says {key} {value}, but its tensors have "
                f"{getattr(config, key)}; they do not belong together."
            )
