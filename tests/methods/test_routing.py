"""A task per image: every answer is that of the image and the task alone, and no other is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.errors import refuses
from tests.support.strategies import (
    FAMILY,
    FAMILY_OPTIONS,
    MIXED,
    SHARING,
    SIDE_FAMILY,
    Node,
    backbone_options,
    graphs,
    model_of,
    some_pixels,
    tiny_backbone,
)
from torch import Tensor

from engram import MemoryViT
from engram.methods import Masked
from engram.methods.routing import Entry, buckets, is_dense

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
ADAPTED = [Node(adapter=2), Node((0,), adapter=1), Node(adapter=2, tokens=2), Node(cells=0)]
#: One image asks for all, most for one: they are computed in groups.
SKEWED = [[f"task{i}" for i in range(20)], "task1", "task2", None, "task3", (), "task1"]


def alone(model: MemoryViT, pixels: Tensor, name: str, images: list[int]) -> Tensor:
    """The obvious way: one image and one task at a time."""
    return torch.cat([model(pixels[i : i + 1], tasks=[name])[name] for i in images])


def check(model: MemoryViT, pixels: Tensor, route: list[Entry]) -> None:
    rows = model.rows(route)
    routed, vectors = model(pixels, route=route), model.embed(pixels, route=route)
    assert list(routed) == list(vectors) == list(rows)
    whole = model.embed(pixels)
    for name, images in rows.items():
        torch.testing.assert_close(routed[name], alone(model, pixels, name, images), **TIGHT)
        torch.testing.assert_close(vectors[name], whole[name][images], **TIGHT)


@st.composite
def routes(draw: Any, tasks: int) -> list[Entry]:
    names = st.sampled_from(["base", *(f"task{i}" for i in range(tasks))])
    entries = st.one_of(st.none(), names, names, st.lists(names, max_size=3))
    return draw(st.lists(entries, min_size=1, max_size=5))


@settings(max_examples=20)
@given(options=backbone_options(), nodes=graphs(families=SHARING), data=st.data())
@example(options={}, nodes=FAMILY, data=["task3", None, ["task1", "task2"], "task4", "task5"])
@example(options={}, nodes=SIDE_FAMILY, data=["task3", "task0", ["task1", "base"], "task2"])
@example(options={}, nodes=MIXED, data=[[f"task{i}", f"task{i + 5}"] for i in range(5)])
@example(options={}, nodes=MIXED, data=["task2", "task9", "task8", "task4", "task6"])
@example(options=FAMILY_OPTIONS["dinov3"], nodes=MIXED, data=["task2", "task9", "task8", "task4"])
@example(options={"registers": 1}, nodes=ADAPTED, data=["task1", "task2", "task3", "task0", ()])
def test_routed_answers_are_those_of_one_image_and_one_task_at_a_time(
    options: dict[str, Any], nodes: list[Node], data: Any
) -> None:
    route = data if isinstance(data, list) else data.draw(routes(len(nodes)))
    model = model_of(nodes, dtype=torch.float64, **options)
    with torch.no_grad():
        check(model, some_pixels(len(route)), route)


def test_an_image_that_asks_for_much_does_not_make_others_cost_more() -> None:
    model = model_of([Node() for _ in range(20)], dtype=torch.float64)
    pixels = some_pixels(len(SKEWED))
    passed: list[int] = []
    for block in model.backbone.layers:
        block.mlp.register_forward_pre_hook(
            lambda _, given: passed.append(given[0][..., 0].numel())
        )
    with torch.no_grad():
        model(pixels, route=SKEWED)
    backbone, asked = 7 * 5, 20 + 4
    last = len(model.backbone.layers) - 1
    assert sum(passed) <= (backbone + asked + 4) * (last + 1)
    with torch.no_grad():
        check(model, pixels, SKEWED)


@pytest.mark.parametrize("nodes", [FAMILY, SIDE_FAMILY, MIXED], ids=["masked", "side", "mixed"])
def test_exact_answers_are_those_of_the_batch_without_a_route_bit_for_bit(
    nodes: list[Node],
) -> None:
    model, pixels = model_of(nodes), some_pixels(4, dtype=torch.float32)
    route = ["task3", ["task1", "task2"], None, "task1"]
    with torch.no_grad():
        routed, whole = model(pixels, exact=True, route=route), model(pixels, exact=True)
    for name, images in model.rows(route).items():
        assert torch.equal(routed[name], whole[name][images])


@pytest.mark.parametrize("nodes", [FAMILY, SIDE_FAMILY, ADAPTED], ids=["masked", "side", "adapter"])
def test_gradients_are_those_of_the_images_that_asked(nodes: list[Node]) -> None:
    model, pixels = model_of(nodes, dtype=torch.float64), some_pixels(4)
    route = ["task1", "task0", ["task2", "task0"], "task3"]
    rows = model.rows(route)
    routed = gradients(model, model(pixels, route=route))
    whole = model(pixels, tasks=list(rows))
    wanted = gradients(model, {name: whole[name][images] for name, images in rows.items()})
    assert routed.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(routed[name], gradient, **TIGHT)


def gradients(model: MemoryViT, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.stack([output.square().sum() for output in outputs.values()]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("nodes", [FAMILY, MIXED, ADAPTED], ids=["masked", "mixed", "adapter"])
def test_a_routed_pass_runs_where_the_model_is(nodes: list[Node]) -> None:
    """On `meta` a tensor that was left on the CPU fails, and so does a look at a value."""
    model, route = model_of(nodes).to("meta"), ["task3", ["task1", "task2"], None, "task0"]
    with torch.no_grad():
        outputs = model(torch.zeros(4, 3, 8, 8, device="meta"), route=route)
    assert {output.device.type for output in outputs.values()} == {"meta"}


def test_tasks_are_asked_for_every_image_besides() -> None:
    model, pixels = model_of(FAMILY), some_pixels(3, dtype=torch.float32)
    with torch.no_grad():
        logits = model(pixels, tasks=["base", "task4"], route=["task1", (), "task2"])
        whole = model(pixels)
    assert {name: len(rows) for name, rows in logits.items()} == {
        "base": 3, "task4": 3, "task1": 1, "task2": 1,
    }  # fmt: skip
    torch.testing.assert_close(logits["base"], whole["base"], rtol=1e-6, atol=1e-5)
    assert model(pixels, route=[(), (), ()]) == {}


def test_what_tasks_keep_is_not_made_again_for_another_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, pixels = model_of([Node() for _ in range(6)]), some_pixels(3, dtype=torch.float32)
    with torch.no_grad():
        model(pixels, route=["task0", "task1", "task2"])
        model(pixels, route=["task3", "task4", "task5"])
        calls: list[object] = []
        monkeypatch.setattr(Masked, "join", lambda *given: calls.append(given))
        model(pixels, route=["task5", "task0", "task2"])
    assert calls == []


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        ("task0", "route is 'task0'"),
        (["task0"], "route has 1 entries"),
        (["task0", 5, None], "route[1] is 5"),
        ([["task0", None], "task1", "task1"], "route[0] is ['task0', None]"),
        (["task0", "other", None], "no task 'other'"),
    ],
)
def test_a_wrong_route_is_refused(route: Any, problem: str) -> None:
    model = model_of([Node(), Node()])
    with refuses(problem):
        model(some_pixels(3, dtype=torch.float32), route=route)


def test_none_asks_a_backbone_that_has_a_head() -> None:
    model = model_of([Node()], head=None)
    with refuses("no head"):
        model(some_pixels(2, dtype=torch.float32), route=["task0", None])


def test_a_task_that_changes_the_backbone_cannot_be_routed() -> None:
    model = MemoryViT(tiny_backbone(torch.float32)).eval()
    model.add_task("a", 3, regime="memory")
    with refuses("'a' has the regime 'memory'"):
        model(some_pixels(2, dtype=torch.float32), route=["a", None])


def test_images_are_grouped_by_what_they_ask_for_only_if_that_saves_work() -> None:
    assert buckets([1, 1, 0, 2], tokens=50) == [[0, 1, 2, 3]]
    assert buckets([1, 100, 0, 2], tokens=50) == [[0, 3], [1]]
    assert is_dense([["a", "b"], ["a", "b"], ["a"]])
    assert not is_dense([["a"], ["b"], ["c"]])
