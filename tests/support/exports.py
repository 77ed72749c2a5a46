"""Models to export, and ways to trace them once or never."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.strategies import scatter
from torch.onnx._internal.exporter._registration import ONNXRegistry

from engram import MemoryViT, random_backbone
from engram.export import Export, write
from engram.export.verify import generated_pixels
from engram.images.preprocessing import Preprocessing
from engram.vit.pos_embed import RotaryConfig

# Every export reads the source of five hundred functions to make it: half a second.
ONNXRegistry.from_torchlib = staticmethod(  # type: ignore[method-assign]
    cache(ONNXRegistry.from_torchlib)
)

#: What is optional in a ViT, all of it: options of `new_model`.
EVERYTHING: dict[str, Any] = {
    "activation": "swiglu",
    "layer_scale": True,
    "pre_norm": True,
    "patch_norm": True,
    "read_norm": True,
    "mlp_norm": True,
    "proj_bias": False,
    "rotary": RotaryConfig(base=100.0, span=6.0),
    "registers": 1,
    "qkv_bias": False,
}

_TRACES: dict[tuple[object, ...], Any] = {}
_CONVERTED: dict[int, Any] = {}


def new_model(**options: Any) -> MemoryViT:
    """Tasks of every kind that share a pass, on a backbone that sees pictures of another size."""
    backbone = random_backbone(
        image_size=16, patch=8, width=32, depth=2, heads=2, classes=7, **options
    )
    if options:
        scatter(backbone, by=0.1)
    backbone.preprocessing = Preprocessing((24, 16), 28, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    model = MemoryViT(backbone)
    model.add_task("plain", ["red", "green", "blue"], 3, seed=0)
    model.add_task("child.of-plain", 4, 2, extends=["plain"], seed=0)
    model.add_task("no-cells", 2, 0, seed=0)
    model.add_task("adapted", 3, 1, regime="masked+adapter", adapter_width=4, tokens=2, seed=0)
    model.add_task("linear", 5, regime="head", seed=0)
    model.add_task("thin", 3, 2, regime="side", rank=4, seed=0)
    model.add_task("child.of-thin", 4, 2, regime="side", rank=4, extends=["thin"], seed=1)
    model.add_task("layers", 3, regime="readout", projected=3, seed=0)
    model.add_task("both", 2, 3, regime="side+readout", rank=4, projected=2, seed=2)
    for seed, task in enumerate(model.tasks.values()):
        scatter(task, by=0.3, seed=seed)
    return model.eval()


def small() -> MemoryViT:
    model = MemoryViT(random_backbone(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3))
    model.add_task("one", 2, 1)
    return model


@dataclass(frozen=True)
class Made:
    model: MemoryViT
    float32: Export
    int8: Export
    torch: Export

    def pixels(self, number: int, seed: int = 5) -> torch.Tensor:
        assert self.model.backbone.preprocessing is not None
        return generated_pixels(self.model.backbone.preprocessing, number, seed)


def trace_once(patch: pytest.MonkeyPatch) -> None:
    """Let equal models share their trace and their ONNX graph, which take nearly all the time."""
    trace, convert = write.trace, torch.onnx.export

    def traced(model: MemoryViT, names: list[str], pixels: torch.Tensor) -> Any:
        contents = [model.engram(name).content for name in model.tasks]
        key = (model.backbone.fingerprint, *pixels.shape[1:], *contents, *names)
        if key not in _TRACES:
            _TRACES[key] = trace(model, names, pixels)
        return _TRACES[key]

    def convert_once(program: Any, **options: Any) -> Any:
        if id(program) not in _CONVERTED:  # it stays in _TRACES, so no other gets its id
            _CONVERTED[id(program)] = convert(program, **options)
        return _CONVERTED[id(program)]

    patch.setattr(write, "trace", traced)
    patch.setattr(torch.onnx, "export", convert_once)


def refuse_to_trace(patch: pytest.MonkeyPatch) -> None:
    def untraced(*_: object) -> None:
        raise AssertionError("the model was traced before the mistake was found")

    patch.setattr(write, "trace", untraced)


def largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert list(found) == list(expected)
    return max(float((found[name] - logits).abs().max()) for name, logits in expected.items())
