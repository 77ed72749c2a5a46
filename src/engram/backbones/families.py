"""The families of ViTs that can be backbones, as facts, and what they were compared with.

docs/backbones.md has them as a table, which scripts/document_backbones.py writes. A family is here
only if its tokens were compared with those of a library that is not ours.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The library that a family was compared with. Small random models, within 1e-5, also at image
#: sizes that they were not made for.
TRANSFORMERS = "transformers"
#: The same, recorded by scripts/record_timm.py with this version.
TIMM_VERSION = "1.0.30"
TIMM = f"timm {TIMM_VERSION}"


@dataclass(frozen=True)
class BackboneFamily:
    """One family of published ViTs."""

    name: str
    transformers: tuple[str, ...]  # its `model_type`s; empty if transformers has none
    timm: str  # how its names begin or end in timm; empty if it is not read from there
    sizes: str
    licence: str
    compared_with: tuple[str, ...]


BACKBONE_FAMILIES = (
    BackboneFamily(
        "ViT", ("vit",), "`vit_*`", "Ti, S, B, L, H with patches of 8 to 32", "Apache-2.0",
        (TRANSFORMERS,),
    ),
    BackboneFamily(
        "DeiT", ("deit",), "`deit_*`, `deit3_*`", "Ti, S, B, L with patches of 16", "Apache-2.0",
        (TRANSFORMERS,),
    ),
    BackboneFamily(
        "DINO", ("vit",), "`vit_*.dino`", "S, B with patches of 8 and 16", "Apache-2.0",
        (TRANSFORMERS,),
    ),
    BackboneFamily(
        "DINOv2", ("dinov2", "dinov2_with_registers"), "`vit_*_dinov2`", "S, B, L, g",
        "Apache-2.0", (TRANSFORMERS,),
    ),
    BackboneFamily(
        "DINOv3", ("dinov3_vit",), "`vit_*_dinov3`, `vit_*_dinov3_qkvb`", "S, S+, B, L, H+, 7B",
        "Meta's DINOv3 License", (TRANSFORMERS, TIMM),
    ),
    BackboneFamily(
        "CLIP", ("clip", "clip_vision_model"), "`vit_*_clip_*`", "B, L, H, g", "MIT",
        (TRANSFORMERS,),
    ),
    BackboneFamily(
        "SigLIP", ("siglip", "siglip_vision_model"), "`vit_*_siglip_*`", "B, L, So400m",
        "Apache-2.0", (TRANSFORMERS,),
    ),
    BackboneFamily(
        "SigLIP 2", ("siglip", "siglip_vision_model"), "`vit_*_siglip_*.v2_webli`",
        "B, L, So400m, giant-opt, of fixed resolution", "Apache-2.0", (TRANSFORMERS,),
    ),
    BackboneFamily(
        "MAE", ("vit_mae",), "`vit_*.mae`", "B, L, H", "Apache-2.0 on the Hub", (TRANSFORMERS,)
    ),
    BackboneFamily(
        "AIMv2", ("aimv2", "aimv2_vision_model"), "`aimv2_*`", "L, H, 1B, 3B; native resolution",
        "Apple's own", (TRANSFORMERS, TIMM),
    ),
    BackboneFamily(
        "EVA-02", (), "`eva02_tiny_*` to `eva02_large_*`, also CLIP", "Ti, S, B, L", "MIT", (TIMM,)
    ),
    BackboneFamily(
        "PE-Core", (), "`vit_pe_core_*`", "T, S, B, L, G", "Apache-2.0", (TIMM,)
    ),
)  # fmt: skip
