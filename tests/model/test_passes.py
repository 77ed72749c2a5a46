"""What heads are given, whichever tasks share the pass and whatever the images are."""

from __future__ import annotations

import torch
from tests.support.strategies import FAMILY, model_of, scatter, some_pixels
from torch import Tensor

from engram import MemoryViT
from engram.methods.forward import FastPass
from engram.methods.masked import Masked
from engram.methods.method import Cached
from engram.model.passes import task_inputs

CLOSE = {"rtol": 1e-6, "atol": 1e-5}


def test_heads_on_the_plain_backbone_share_a_pass_with_masked_tasks(pixels: Tensor) -> None:
    model = model_of(FAMILY)
    for regime in ("head", "mlp-head"):
        scatter(model.add_task(regime, 3, regime=regime))
    lonely = MemoryViT(model.backbone)
    scatter(lonely.add_task("head", 3, regime="head"))
    with torch.no_grad():
        for exact in (False, True):
            logits = model(pixels, exact=exact)
            wanted = model.task("head").head(model.backbone.tokens(pixels)[:, 0])
            torch.testing.assert_close(logits["head"], wanted, **CLOSE)
        assert torch.equal(logits["head"], lonely(pixels, exact=True)["head"])


def test_two_images_do_not_read_each_other(either_family: MemoryViT, pixels: Tensor) -> None:
    with torch.no_grad():
        together, first = either_family(pixels), either_family(pixels[:1])
    for name in together:
        torch.testing.assert_close(together[name][:1], first[name], **CLOSE)


def test_images_of_other_sizes_are_answered(either_family: MemoryViT) -> None:
    larger = some_pixels(2, 16, torch.float32)
    with torch.no_grad():
        logits = either_family(larger, exact=True)
        assert torch.equal(logits["base"], either_family.backbone(larger))
        for name, fast in either_family(larger).items():
            torch.testing.assert_close(fast, logits[name], **CLOSE)


def test_outputs_come_from_a_pass_that_was_made_elsewhere(
    either_family: MemoryViT, pixels: Tensor
) -> None:
    masked = [name for name, task in either_family.tasks.items() if task.method.streams]
    backbone, size, layers = (
        either_family.backbone,
        (pixels.shape[-2], pixels.shape[-1]),
        dict[int, Tensor](),
    )
    streams: dict[str, Tensor] = {}
    with torch.no_grad():
        x = backbone.embed(pixels)
        if masked:
            memory = Masked.memory(task_inputs(either_family, masked), backbone)
            together = FastPass(memory, x.shape[1], layer_hook=layers.__setitem__)
            raw, tokens = together.run(backbone, x, x.shape[1])
            streams = memory.split(tokens)
        else:
            raw = backbone.encode(x, size, layers.__setitem__)
        normed, expected = list(layers.values()), either_family(pixels)
        cached = Cached(layers=normed, raw=raw, streams=streams)
        found = either_family.from_cache(cached, list(expected), size).outputs()
        for name, output in found.items():
            torch.testing.assert_close(output, expected[name], **CLOSE)
