"""Other methods do the same work: the same logits and gradients, one task per pass."""

import pytest
import torch

from benchmarks.peers import (
    Lora,
    Straightforward,
    VitPytorch,
    forward_cases,
    installed,
    training_steps,
)
from engram import MemoryViT, random_backbone
from engram.errors import EngramError
from engram.experiments.bench import Separate, Workload, forward
from engram.vit import ViT


@pytest.fixture
def backbone() -> ViT:
    return random_backbone(image_size=16, width=16, depth=2, heads=2)


def with_values(model: MemoryViT) -> MemoryViT:
    """Heads start at zero: give them values."""
    for task in model.tasks.values():
        torch.nn.init.normal_(task.head.weight)
        torch.nn.init.normal_(task.head.bias)
    return model.eval()


# The straightforward implementation is a peer: it must compute the same thing


@pytest.mark.parametrize(
    "options", [{}, {"layer_scale": True, "qkv_bias": False}, {"registers": 2}]
)
def test_the_straightforward_way_gives_the_same_logits(options: dict[str, object]) -> None:
    backbone = random_backbone(image_size=16, width=16, depth=3, heads=2, **options)
    model = MemoryViT(backbone)
    for i, cells in enumerate((5, 0, 2)):
        model.add_task(f"task{i}", classes=3 + i, cells=cells)
    model = with_values(model)
    pixels = torch.randn(3, 3, 16, 16)
    with torch.inference_mode():
        wanted, found = model(pixels), Straightforward(model)(pixels)
    assert wanted.keys() == found.keys() == {"base", "task0", "task1", "task2"}
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-5, rtol=1e-4)


def test_the_straightforward_way_gives_the_same_gradients(backbone: ViT) -> None:
    model = MemoryViT(backbone)
    task = model.add_task("task0", classes=3, cells=2)
    with_values(model)
    pixels = torch.randn(2, 3, 16, 16)
    found = []
    for answer in (model, Straightforward(model)):
        model.zero_grad()
        answer(pixels)["task0"].square().sum().backward()
        found.append([p.grad.clone() for p in task.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) == 4
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_the_straightforward_way_refuses_what_it_cannot_do(backbone: ViT) -> None:
    model = MemoryViT(backbone)
    model.add_task("a", 2)
    model.add_task("b", 2, extends=["a"])
    with pytest.raises(EngramError, match="no parents"):
        Straightforward(model)


# The other libraries


@pytest.mark.parametrize("name", ["separate", "vit-pytorch", "lora"])
def test_peers_answer_one_task_a_pass_and_train_it(backbone: ViT, name: str) -> None:
    if name != "separate" and name not in installed(backbone):
        pytest.skip(f"{name} is not installed")
    peer = {
        "separate": lambda: Separate(backbone, 2, 3),
        "vit-pytorch": lambda: VitPytorch(backbone, 2, 3, 5),
        "lora": lambda: Lora(backbone, 2, 3),
    }[name]()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        first, second, again = (peer.one_pass(pixels) for _ in range(3))
    assert first.shape == (2, 3)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)  # two tasks, in turn
    trained = list(peer.trained())
    counts = {
        "separate": sum(p.numel() for n, p in backbone.named_parameters() if n[:5] != "head.") + 51,
        "vit-pytorch": 2 * 5 * 16 + 16 + 32 + 51,  # cells, class token, norm, head
        "lora": 2 * 2 * (16 * 8 + 8 * 16) + 51,  # layers, q and v, down and up; head
    }
    assert sum(p.numel() for p in trained) == counts[name]


def test_shapes_that_other_libraries_lack_are_measured_without_them() -> None:
    assert installed(random_backbone(registers=2)) == []
    assert installed(random_backbone(class_token=False, prefix_positions=0)) == []


def test_every_peer_has_a_row_and_a_step_that_leaves_the_backbone(backbone: ViT) -> None:
    workload, before = Workload(backbone, seconds=0, least=1, passes=2), backbone.fingerprint
    rows = forward(workload, [3], [1], others=forward_cases(workload, [3]))
    assert ("straightforward", 3) in {(row.what, row.tasks) for row in rows}
    steps = training_steps(workload, 2)
    assert {"straightforward, all gradients", "straightforward, backbone frozen"} <= steps.keys()
    for make in steps.values():
        make()()
    assert backbone.fingerprint == before
    assert not any(p.requires_grad for p in backbone.parameters())
