"""Costs of tasks on a page: parameters and multiply-accumulates, in every regime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engram.backbones.shape import BackboneShape
from engram.methods import METHODS
from engram.model import MemoryViT
from engram.report.contents import Section, Table
from engram.tasks.costs import Costs, backbone_macs, task_costs
from engram.tasks.spec import TaskSpec
from engram.tasks.task_settings import TaskSettings

_COLUMNS = ("parameters", "MMAC", "MFLOP", "of the ViT")


def costs_by_task(model: MemoryViT) -> dict[str, Costs]:
    """Costs of every attached task, with all that it reads."""
    shape, size = BackboneShape.measure(model.backbone), model.preprocessing.size
    costs = {}
    for name, task in model.tasks.items():
        read = [model.task(one).spec for one in model.registry.closure(task.spec.extends)]
        costs[name] = task_costs(shape, task.spec, read, size)
    return costs


def costs_section(model: MemoryViT, specs: Sequence[TaskSpec]) -> Section:
    """Every regime for a task like the first; if there are several tasks, those as well."""
    tables = [_regimes(model, specs[0])]
    if len(specs) > 1:
        costs = costs_by_task(model)
        rows = [(spec.name, spec.regime, *_figures(costs[spec.name])) for spec in specs]
        columns, note = ("task", "regime", *_COLUMNS), "The tasks of this page."
        tables.append(Table(columns, rows, note, text_columns=2))
    return Section("regimes", "What it costs", tables)


def _regimes(model: MemoryViT, spec: TaskSpec) -> Table:
    shape, size = BackboneShape.measure(model.backbone), model.preprocessing.size
    known, rows = TaskSettings.from_spec(spec).method_settings, []
    for name, method in (METHODS | {spec.regime: type(spec.method)}).items():
        shared = {k: v for k, v in known.items() if k in method.setting_names()}
        if method.one_class != spec.kind_object.one_class:
            continue
        task = replace(
            spec, extends=(), method=spec.method if name == spec.regime else method(**shared)
        )
        if spec.kind_object.per_pixel and not method.answers_pixels:
            continue  # averages over the patches answer for no pixel
        costs = task_costs(shape, task, (), size)
        shares_pass = "no" if costs.own_pass else "yes"
        rows.append((name, method.about, *_figures(costs), shares_pass))
    backbone = backbone_macs(shape, size)
    note = (
        f"A task like {spec.name} ({len(spec.classes):,} {spec.kind_object.nouns[1]}) in every "
        "regime, with its settings where they are the same and the defaults elsewhere: what "
        f"it adds to the ViT's pass for one image, which takes {backbone / 1e6:,.1f} MMAC, and the "
        "parameters it trains, including the head. One MAC is a multiplication and an addition, so "
        "two FLOPs; norms and activations are not counted. A regime that does not "
        "share the pass runs the whole ViT once more."
    )
    columns = ("regime", "what trains", *_COLUMNS, "shares the pass")
    own = [row[0] for row in rows].index(spec.regime)
    return Table(columns, rows, note, own, text_columns=2)


def _figures(costs: Costs) -> tuple[str, ...]:
    """The cells of `_COLUMNS`."""
    macs = (costs.macs + costs.head_macs) / 1e6
    return (
        f"{costs.parameters + costs.head_parameters:,}",
        f"{macs:,.2f}",
        f"{2 * macs:,.2f}",
        f"{costs.share:.2%}",
    )
