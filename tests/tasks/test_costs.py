"""Costs are those of the paper, and what torch counts when the model runs."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engram import MemoryViT, random_trunk
from engram.tasks.costs import task_costs, trunk_macs
from engram.tasks.regimes import REGIMES
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec
from engram.vit import ViTConfig

B32 = ViTConfig((224, 224), patch=32, width=768, depth=12, heads=12, mlp_width=3072)
B16 = ViTConfig((224, 224), patch=16, width=768, depth=12, heads=12, mlp_width=3072)
IMAGES = 3


def spec(regime: str = "masked", **settings: object) -> TaskSpec:
    return TaskSpec("t", ("a", "b", "c"), regime=regime, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("cells", "count"), [(1, 9_984), (5, 46_848), (10, 92_928), (20, 185_088)])
def test_parameters_are_those_of_the_paper(cells: int, count: int) -> None:
    for regime in ("masked", "memory"):
        assert task_costs(TrunkShape.of(B32), spec(regime, cells=cells)).parameters == count


def test_parameters_are_those_of_tables_4_and_5() -> None:
    def count(regime: str) -> int:
        return task_costs(TrunkShape.of(B16), spec(regime, cells=5, adapter_width=20)).parameters

    token = 768
    assert count("class") == token
    assert count("memory") - token == 768 * 12 * 5
    assert count("adapter") - token == 737_280  # "737K"
    assert count("memory+adapter") - token == 783_360  # "783K"
    assert count("head") == count("mlp-head") == 0
    assert count("full") == 85_798_656  # a B/16 without its head
    assert task_costs(TrunkShape.of(B16), spec("head")).head_parameters == 768 * 3 + 3


def test_macs_are_those_of_the_paper() -> None:
    b32, b16 = TrunkShape.of(B32), TrunkShape.of(B16)
    assert round(trunk_macs(b32) / 1e9, 2) == 4.41
    assert round(trunk_macs(b16) / 1e9, 2) == 17.56
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


TRUNKS = {
    "plain": {},
    "no class token": {"class_token": False, "prefix_positions": 0},
    "registers, swiglu": {"registers": 2, "activation": "swiglu", "mlp_width": 48},
}


@pytest.mark.parametrize("options", TRUNKS.values(), ids=TRUNKS.keys())
def test_a_trunk_costs_what_torch_counts(options: dict[str, object]) -> None:
    trunk = random_trunk(classes=0, **options)  # type: ignore[arg-type]
    pixels = torch.rand(IMAGES, 3, 32, 48)

    class Tokens(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return trunk.tokens(pixels)

    assert flops(Tokens()) == 2 * IMAGES * trunk_macs(TrunkShape.of(trunk), (32, 48))


@pytest.mark.parametrize("options", TRUNKS.values(), ids=TRUNKS.keys())
@pytest.mark.parametrize(
    "task",
    [spec(regime) for regime in REGIMES]
    + [spec("memory", update="propagate"), spec("memory", update="add"), spec(cells=0)]
    + [spec(tokens=2), spec("masked+adapter", tokens=2, adapter_width=5)]
    + [spec("side", cells=0, rank=5), spec("side+readout", rank=4)]
    + [spec("readout", squares=True), spec("side", side_form=1)]
    + [spec(regime, kind="segmentation", values=(0, 1, 2)) for regime in ("side", "head")],
    ids=lambda task: f"{task.regime}-{task.update}-{task.cells}-{task.tokens}-{task.kind}",
)
def test_a_task_costs_what_torch_counts(task: TaskSpec, options: dict[str, object]) -> None:
    trunk = random_trunk(classes=0, **options)  # type: ignore[arg-type]
    model = MemoryViT(trunk).eval()
    added = model.add(task)
    costs = task_costs(TrunkShape.of(trunk), task)
    assert costs.parameters + costs.head_parameters == sum(p.numel() for p in added.parameters())

    expected = IMAGES * (costs.trunk_macs + costs.macs + costs.head_macs) + costs.once
    if task.parts.masked and task.tokens > 1:  # they read each other one by one, uncounted
        expected -= IMAGES * 2 * task.tokens**2 * trunk.config.width * trunk.config.depth
    assert flops(model, torch.rand(IMAGES, 3, 32, 32), exact=True) == 2 * expected


def test_side_patches_that_extend_cost_what_torch_counts() -> None:
    trunk = random_trunk(classes=0)
    model = MemoryViT(trunk).eval()
    parents = [spec("side"), spec("side", cells=2)]
    child = spec("side", cells=1, extends=("p0", "p1"))
    for task, name in ((parents[0], "p0"), (parents[1], "p1"), (child, "child")):
        model.add(replace(task, name=name))
    each = [task_costs(TrunkShape.of(trunk), task) for task in (*parents, child)]
    macs = each[0].trunk_macs + each[2].head_macs + sum(costs.macs for costs in each)
    expected = IMAGES * macs + sum(costs.once for costs in each)
    assert flops(model, torch.rand(IMAGES, 3, 32, 32), ["child"]) == 2 * expected


def test_side_patches_and_readout_cost_less_than_a_hundredth_of_a_pass() -> None:
    b32, b16 = TrunkShape.of(B32), TrunkShape.of(B16)
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
    shape = TrunkShape.of(B32)
    parents = [spec(cells=3), spec(cells=4)]
    more = task_costs(shape, spec(), parents).macs - task_costs(shape, spec()).macs
    assert more == 12 * 2 * 768 * (3 + 1 + 4 + 1)
