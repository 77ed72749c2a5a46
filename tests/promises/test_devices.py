"""Nothing needs a habit of the CPU.

There is no GPU where these tests usually run, so the model is on the `meta` device: a tensor that
was left on the CPU fails there, and so does code that looks at a value, which on a GPU would wait.
The tests marked `accelerator` compare values; they are skipped where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.support.devices import accelerator
from tests.support.strategies import FAMILY, MIXED, Node, model_of
from torch import Tensor

from engram import MemoryViT, Recipe
from engram.inference.engine import TorchEngine, on_cpu, stack_views
from engram.train.features.feeds import BatchShard
from engram.train.loop.mixup import Mixup, parts
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.trainable import train_only
from engram.util.tensors import device_for

META = torch.device("meta")
#: Tasks that share a pass, with parents; and tasks that have a pass of their own.
GRAPHS = {
    "masked": FAMILY,
    "mixed": MIXED,
    "memory+adapter": [Node(family="memory", adapter=2)],
    "full": [Node(family="full")],
}


def views(images: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (images, 8, 8, 3)
    return list(torch.randint(0, 256, size, generator=generator).to(torch.uint8))


def share_for(kind: str, classes: int, images: int = 3) -> BatchShard:
    """A batch as the loader gives it, on the CPU."""
    labels = {
        "classification": torch.arange(images) % classes,
        "multilabel": torch.ones(images, classes, dtype=torch.bool),
        "regression": torch.ones(images, classes),
        "segmentation": torch.zeros(images, 8, 8, dtype=torch.uint8),
    }
    return BatchShard(torch.stack(views(images)), labels[kind], torch.arange(images))


@pytest.mark.parametrize("exact", [False, True], ids=["together", "exact"])
@pytest.mark.parametrize("nodes", GRAPHS.values(), ids=list(GRAPHS))
def test_a_forward_pass_leaves_no_tensor_on_the_cpu_and_looks_at_no_value(
    nodes: list[Node], exact: bool
) -> None:
    model = model_of(nodes, depth=2)
    engine = TorchEngine(model, exact, META)
    pixels = stack_views(views(), model.preprocessing, META)
    for _ in range(2):  # the second pass uses what the first one kept
        outputs = engine.run(pixels, list(model.tasks))
        vectors = engine.embed(pixels)
    assert list(outputs) == list(model.tasks)
    assert {tensor.device for tensor in (*outputs.values(), *vectors.values())} == {META}


@pytest.mark.parametrize(
    ("graph", "names", "optimizer"),
    [
        ("masked", ["task3", "task5"], "sgd"),
        ("mixed", ["task2", "task4", "task6", "task8"], "adamw"),
        ("memory+adapter", ["task0"], "adamw"),
        ("full", ["task0"], "sgd"),
    ],
)
def test_a_training_step_leaves_no_tensor_on_the_cpu_and_looks_at_no_value(
    graph: str, names: list[str], optimizer: str
) -> None:
    model = model_of(GRAPHS[graph], depth=2).to(META).train()
    for name in names:
        trainer = stepped(model, name, Recipe(optimizer=optimizer, clip=1.0, ema=0.9))
        assert any(p.grad is not None for p in trainer.parameters)
        assert {p.grad.device for p in trainer.parameters if p.grad is not None} == {META}


def stepped(model: MemoryViT, name: str, recipe: Recipe) -> TaskTrainer:
    """A trainer after one step: forward, loss, backward and update."""
    train_only(model, name)
    trainer, device = TaskTrainer(model, name, recipe), model.backbone.device
    share = share_for(trainer.task.kind.name, len(trainer.task.spec.classes))
    mixup = Mixup.drawn(3, 0.2, [0]) if trainer.task.kind.mixes else None
    for inputs, targets, _ in parts(share, 2, mixup, device):
        pixels = stack_views(inputs.unbind(), model.preprocessing, device)
        loss = trainer.loss(model(pixels, tasks=[name])[name], targets)
        loss.backward()
    trainer.step(0, 10)
    return trainer


# Where there is an accelerator


def close(one: Sequence[Tensor], other: Sequence[Tensor], by: float) -> bool:
    return all(
        torch.allclose(a.detach().cpu(), b.detach().cpu(), atol=by, rtol=by)
        for a, b in zip(one, other, strict=True)
    )


@accelerator
@pytest.mark.parametrize("nodes", GRAPHS.values(), ids=list(GRAPHS))
def test_an_accelerator_answers_as_the_cpu_does(nodes: list[Node]) -> None:
    found = {}
    for name in ("cpu", "auto"):
        engine = TorchEngine(model_of(nodes), device=device_for(name))
        pixels = stack_views(views(), engine.model.preprocessing, engine.device)
        found[name] = on_cpu(engine.run(pixels, list(engine.model.tasks)))
    assert close(list(found["cpu"].values()), list(found["auto"].values()), by=1e-3)


@accelerator
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_accelerator_answers_in_half_precision(precision: str) -> None:
    found = {}
    for each in ("fp32", precision):
        engine = TorchEngine(model_of(FAMILY), device=device_for("auto"), precision=each)
        pixels = stack_views(views(), engine.model.preprocessing, engine.device)
        found[each] = on_cpu(engine.run(pixels, list(engine.model.tasks)))
    assert not close(list(found["fp32"].values()), list(found[precision].values()), by=1e-7)
    assert close(list(found["fp32"].values()), list(found[precision].values()), by=0.2)


@accelerator
def test_an_accelerator_learns_as_the_cpu_does() -> None:
    trainers = [
        stepped(model_of(FAMILY).to(device_for(name)).train(), "task3", Recipe(optimizer="sgd"))
        for name in ("cpu", "auto")
    ]
    assert close(trainers[0].parameters, trainers[1].parameters, by=1e-3)
