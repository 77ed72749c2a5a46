"""Costs are those of the paper, and what torch counts when the model runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.regimes import SUPERVISED, known
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engram import MemoryViT, random_backbone
from engram.backbones.shape import BackboneShape
from engram.methods import create_method
from engram.tasks.costs import backbone_macs, task_costs
from engram.tasks.spec import TaskSpec
from engram.vit.vit import ViTConfig

B32 = ViTConfig((224, 224), patch=32, width=768, depth=12, heads=12, mlp_width=3072)
B16 = ViTConfig((224, 224), patch=16, width=768, depth=12, heads=12, mlp_width=3072)
IMAGES = 3


def spec(
    regime: str = "masked",
    kind: str = "classification",
    extends: tuple[str, ...] = (),
    **settings: Any,
) -> TaskSpec:
    method = create_method(regime, known(regime, **settings))
    return TaskSpec.create("t", ("a", "b", "c"), method, kind=kind, extends=extends)


@pytest.mark.parametrize(("cells", "count"), [(1, 9_984), (5, 46_848), (10, 92_928), (20, 185_088)])
def test_parameters_are_those_of_the_paper(cells: int, count: int) -> None:
    for regime in ("masked", "memory"):
        assert task_costs(BackboneShape.measure(B32), spec(regime, cells=cells)).parameters == count


def test_parameters_are_those_of_tables_4_and_5() -> None:
    def count(regime: str) -> int:
        return task_costs(
            BackboneShape.measure(B16), spec(regime, cells=5, adapter_width=20)
        ).parameters

    token = 768
    assert count("class") == token
    assert count("memory") - token == 768 * 12 * 5
    assert count("adapter") - token == 737_280  # "737K"
    assert count("memory+adapter") - token == 783_360  # "783K"
    assert count("head") == count("mlp-head") == 0
    assert count("full") == 85_798_656  # a B/16 without its head
    assert task_costs(BackboneShape.measure(B16), spec("head")).head_parameters == 768 * 3 + 3


def test_macs_are_those_of_the_paper() -> None:
    b32, b16 = BackboneShape.measure(B32), BackboneShape.measure(B16)
    assert round(backbone_macs(b32) / 1e9, 2) == 4.41
    assert round(backbone_macs(b16) / 1e9, 2) == 17.56
    assert round(task_costs(b32, spec()).macs / 1e9, 3) == 0.086
    assert round(task_costs(b16, spec()).macs / 1e9, 3) == 0.089
    assert round(task_costs(b32, spec()).share, 3) == 0.02  # about 1 / (N + 1)
    assert round(task_costs(b16, spec()).share, 3) == 0.005
    assert round(task_costs(b32, spec("memory")).macs / 1e6, 1) == 4.6
    assert round(task_costs(b16, spec("memory")).macs / 1e6, 1) == 18.2


def flops(model: torch.nn.Module, *arguments: object, **options: object) -> int:
    """What torch counts; attention as matrix products, because it counts no fused CPU kernel."""
    model.requires_grad_(False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*arguments, **options)
    return counter.get_total_flops()


BACKBONES = {
    "plain": {},
    "no class token": {"class_token": False, "prefix_positions": 0},
    "registers, swiglu": {"registers": 2, "activation": "swiglu", "mlp_width": 48},
}


@pytest.mark.parametrize("options", BACKBONES.values(), ids=BACKBONES.keys())
def test_a_backbone_costs_what_torch_counts(options: dict[str, object]) -> None:
    backbone = random_backbone(classes=0, **options)  # type: ignore[arg-type]
    pixels = torch.rand(IMAGES, 3, 32, 48)

    class Tokens(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return backbone.tokens(pixels)

    assert flops(Tokens()) == 2 * IMAGES * backbone_macs(BackboneShape.measure(backbone), (32, 48))


@pytest.mark.parametrize("options", BACKBONES.values(), ids=BACKBONES.keys())
@pytest.mark.parametrize(
    "task",
    [spec(regime) for regime in SUPERVISED]
    + [TaskSpec.create("t", ["a"], create_method("patchcore", {"bank": 7}), kind="anomaly")]
    + [spec("memory", update="propagate"), spec("memory", update="add"), spec(cells=0)]
    + [spec(tokens=2), spec("masked+adapter", tokens=2, adapter_width=5)]
    + [spec("side", cells=0, rank=5), spec("side+readout", rank=4)]
    + [spec("readout", grid=True), spec("readout", projected=3)]
    + [spec(regime, kind="segmentation") for regime in ("side", "head")],
    ids=lambda task: f"{task.method}-{task.kind}",
)
def test_a_task_costs_what_torch_counts(task: TaskSpec, options: dict[str, object]) -> None:
    backbone = random_backbone(classes=0, **options)  # type: ignore[arg-type]
    model = MemoryViT(backbone).eval()
    added = model.add(task)
    costs = task_costs(BackboneShape.measure(backbone), task)
    assert costs.parameters + costs.head_parameters == sum(p.numel() for p in added.parameters())

    expected = IMAGES * (costs.backbone_macs + costs.macs + costs.head_macs) + costs.once
    tokens = added.method.settings().get("tokens", 1)
    if tokens > 1:  # they read each other one by one, uncounted
        expected -= IMAGES * 2 * tokens**2 * backbone.config.width * backbone.config.depth
    assert flops(model, torch.rand(IMAGES, 3, 32, 32), exact=True) == 2 * expected


def test_side_patches_that_extend_cost_what_torch_counts() -> None:
    backbone = random_backbone(classes=0)
    model = MemoryViT(backbone).eval()
    parents = [spec("side"), spec("side", cells=2)]
    child = spec("side", cells=1, extends=("p0", "p1"))
    for task, name in ((parents[0], "p0"), (parents[1], "p1"), (child, "child")):
        model.add(replace(task, name=name))
    each = [task_costs(BackboneShape.measure(backbone), task) for task in (*parents, child)]
    macs = each[0].backbone_macs + each[2].head_macs + sum(costs.macs for costs in each)
    expected = IMAGES * macs + sum(costs.once for costs in each)
    assert flops(model, torch.rand(IMAGES, 3, 32, 32), ["child"]) == 2 * expected


def test_side_patches_and_readout_cost_less_than_a_hundredth_of_a_pass() -> None:
    b32, b16 = BackboneShape.measure(B32), BackboneShape.measure(B16)
    assert round(task_costs(b32, spec("side")).macs / 1e6, 1) == 8.8
    assert round(task_costs(b16, spec("side")).macs / 1e6, 1) == 34.7
    assert round(task_costs(b32, spec("side")).share, 4) == 0.002
    assert round(task_costs(b16, spec("side")).share, 4) == 0.002
    readout = task_costs(b32, spec("readout"))
    assert (readout.parameters, readout.macs, readout.once) == (0, 0, 0)
    assert readout.head_macs == 3 * 13 * 768 * 3
    assert not readout.own_pass
    assert not task_costs(b32, spec("side")).own_pass


def test_a_task_that_extends_pays_for_what_it_reads() -> None:
    shape = BackboneShape.measure(B32)
    parents = [spec(cells=3), spec(cells=4)]
    more = task_costs(shape, spec(), parents).macs - task_costs(shape, spec()).macs
    assert more == 12 * 2 * 768 * (3 + 1 + 4 + 1)
