"""One protocol answers for evaluation, prediction, export and the service."""

from collections.abc import Sequence

import pytest
import torch
from tests.support.engrams import familiar
from tests.support.strategies import FAMILY, model_of
from torch import Tensor

from engram import EngramError, MemoryViT
from engram.images.preprocessing import normalise
from engram.inference.engine import (
    Engine,
    OneByOne,
    Outputs,
    TorchEngine,
    by_output,
    on_cpu,
    stack_views,
)


@pytest.mark.parametrize("name", ["base", "task0", "task5"])
def test_an_exact_engine_answers_bit_for_bit_as_the_task_alone(
    name: str, family: MemoryViT, pixels: Tensor
) -> None:
    crowded = TorchEngine(family, exact=True).run(pixels, ["base", *family.tasks])
    nodes = [] if name == "base" else [int(name.removeprefix("task"))]
    alone = TorchEngine(model_of(FAMILY, nodes), exact=True).run(pixels, [name])
    assert list(alone) == [name]
    assert torch.equal(crowded[name], alone[name])


def test_an_engine_gives_what_the_model_gives_and_keeps_no_graph(
    family: MemoryViT, pixels: Tensor
) -> None:
    family.train()
    outputs = TorchEngine(family).run(pixels, ("task3", "base"))
    assert not family.training
    with torch.no_grad():
        expected = family(pixels, tasks=["task3", "base"])
    assert list(outputs) == ["task3", "base"]
    for name, values in outputs.items():
        assert torch.equal(values, expected[name])
        assert not values.requires_grad


def test_outputs_familiarity_and_the_backbones_vectors_come_from_one_pass(
    family: MemoryViT, pixels: Tensor
) -> None:
    familiar(family.task("task0"))
    engine = TorchEngine(family)
    outputs, familiarity, vectors = engine.with_base(pixels, ["task0", "task3"])
    found, expected = (
        by_output(outputs, familiarity),
        engine.run(pixels, ["task0", "task3"], familiarity=True),
    )
    assert list(found) == list(expected) == ["task0", "task3", "task0:familiarity"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vectors, engine.embed(pixels, ["base"])["base"])
    assert engine.with_base(pixels, [])[:2] == ({}, {})


class Counting(Engine):
    """An engine whose answer for an image depends on the images next to it, as int8 does."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def run(self, pixels: Tensor, tasks: Sequence[str], familiarity: bool = False) -> Outputs:
        self.batches.append(len(pixels))
        scale = pixels.abs().amax()
        return {name: pixels.mean((2, 3)) / scale + i for i, name in enumerate(tasks)}


def test_one_by_one_asks_for_a_single_image_at_a_time(pixels: Tensor) -> None:
    engine = Counting()
    outputs = OneByOne(engine).run(pixels, ["a", "b"])
    assert engine.batches == [1, 1, 1]
    assert list(outputs) == ["a", "b"]
    for i in range(3):
        alone = Counting().run(pixels[i : i + 1], ["a", "b"])
        for name, values in outputs.items():
            assert torch.equal(values[i : i + 1], alone[name])
    together = Counting().run(pixels, ["a", "b"])
    assert not torch.allclose(together["a"], outputs["a"])


def test_half_precision_changes_answers_a_little(family: MemoryViT, pixels: Tensor) -> None:
    try:
        half = TorchEngine(family, precision="bf16")
    except EngramError as error:
        pytest.skip(str(error))
    whole = on_cpu(TorchEngine(family).run(pixels, ["task3"]))["task3"]
    answers = on_cpu(half.run(pixels, ["task3"]))["task3"]
    assert not torch.equal(answers, whole)
    assert torch.allclose(answers, whole, atol=0.2, rtol=0.1)


def test_views_and_stack_views_a_client_make_one_batch(family: MemoryViT) -> None:
    views = list(torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8))
    pixels = normalise(torch.stack(views), family.preprocessing)
    cpu = torch.device("cpu")
    assert torch.equal(stack_views(views, family.preprocessing, cpu), pixels)
    assert torch.equal(stack_views([views[0], pixels[1]], family.preprocessing, cpu), pixels)


def test_scores_come_with_the_outputs_of_the_same_pass(family: MemoryViT, pixels: Tensor) -> None:
    engine, names = TorchEngine(family), ["base", *family.tasks]
    outputs = engine.run(pixels, names, familiarity=True)
    assert list(outputs) == names
    familiar(family.task("task3"))
    again = engine.run(pixels, names, familiarity=True)
    assert list(again) == [*names, "task3:familiarity"]
    assert all(torch.equal(again[name], outputs[name]) for name in names)
    assert list(engine.run(pixels, ["base", "task1"], familiarity=True)) == ["base", "task1"]
