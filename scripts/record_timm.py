"""Record what timm computes, for tests that compare with it where it is not installed.

    python scripts/record_timm.py            # needs timm; writes tests/support/timm/*.safetensors

Each file holds the weights of a tiny random model of timm, a few images, and timm's own tokens and
answers for them: also at image sizes that the model was not made for. Its metadata have the version
of timm and what `config.json` of a timm folder would say.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import timm  # type: ignore[import-not-found, unused-ignore]
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "tests" / "support" / "timm"
TINY = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "img_size": 16}
#: By file: the model of timm, and what makes it tiny.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov3": ("vit_small_patch16_dinov3_qkvb", {"mlp_ratio": 2}),
    "dinov3-gated": ("vit_small_plus_patch16_dinov3", {"mlp_ratio": 2, "num_reg_tokens": 2}),
    "eva02": ("eva02_tiny_patch14_224", {"ref_feat_shape": 3, "num_classes": 3}),
    "eva02-norm": ("eva02_base_patch14_224", {"ref_feat_shape": 3, "num_classes": 0}),
    "eva02-clip": ("eva02_base_patch16_clip_224", {"ref_feat_shape": 3, "num_classes": 3}),
    "pe-core": (
        "vit_pe_core_small_patch16_384",
        {"ref_feat_shape": 4, "attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 2, "num_classes": 3},
    ),
    "pe-core-no-class-token": (
        "vit_pe_core_gigantic_patch14_448",
        {"ref_feat_shape": 4, "attn_pool_num_heads": 4, "mlp_ratio": 2, "num_classes": 3},
    ),
    "aimv2": ("aimv2_large_patch14_224", {"num_classes": 0}),
}
#: What the tensors do not show, so that a folder of timm says it in `model_args`.
ARGUMENTS = ("num_heads", "attn_pool_num_heads", "ref_feat_shape")
SIZES = ((16, 16), (12, 20))


def randomised(model: nn.Module) -> nn.Module:
    """No zeros and ones for a mistake to hide behind."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            one = parameter.ndim == 1 and not name.endswith("bias")
            parameter.copy_(float(one) + 0.3 * torch.randn(parameter.shape))
    return model.eval()


def record(name: str) -> None:
    architecture, options = MODELS[name]
    torch.manual_seed(0)
    arguments = TINY | options
    model = randomised(timm.create_model(architecture, **arguments))
    tensors = {f"weights.{n}": t.detach().contiguous() for n, t in model.state_dict().items()}
    for size in SIZES:
        pixels = torch.randn(1, 3, *size)
        with torch.no_grad():
            tokens, answer = computed(model, pixels)
        case = "x".join(map(str, size))
        tensors |= {f"pixels.{case}": pixels, f"tokens.{case}": tokens, f"answer.{case}": answer}
    config = {
        "architecture": architecture,
        "global_pool": model.global_pool,
        "model_args": {n: arguments[n] for n in ARGUMENTS if n in arguments},
    }
    metadata = {"timm": timm.__version__, "config": json.dumps(config)}
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata)


def computed(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """timm's tokens after its final norm, if it has one, and its answer."""
    if not getattr(model, "dynamic_img_size", False):
        model = copy.deepcopy(model)
        model.set_input_size(pixels.shape[-2:])
    return model.forward_features(pixels), model(pixels)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        record(name)
