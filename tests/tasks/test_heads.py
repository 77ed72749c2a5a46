"""Heads: from a task's own tokens, or the backbone's patches, to its output."""

import pytest
import torch
from tests.support.engrams import randomised, small_backbone

from engram import MemoryViT
from engram.methods.forward import BackbonePass, forward_tasks
from engram.methods.masked import Masked
from engram.methods.method import HeadInput, Patches
from engram.model.passes import task_inputs
from engram.tasks.heads import HeadSizes, MaskHead, NumberHead, TaskHead


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.rand(2, 3, 16, 24)  # not square, and not the backbone's own size


def test_a_class_of_masked_segmentation_is_its_token_times_the_patches(
    pixels: torch.Tensor,
) -> None:
    """Written out for one picture, from the tokens that the model's own memory computes."""
    model = MemoryViT(small_backbone(patch=4)).eval()
    task = randomised(model.add_task("t", 3, 2, kind="segmentation"))
    assert task.class_token is not None
    assert task.class_token.shape == (3, 16)
    backbone = model.backbone
    memory = Masked.memory(task_inputs(model, ["t"]), backbone)
    with torch.no_grad():
        x = backbone.embed(pixels[:1])
        run = BackbonePass(backbone, x, x.shape[1])
        own = backbone.norm(forward_tasks(backbone, run, [memory], 1)[0])[0]  # (classes, D)
        patches = backbone.norm(run.tokens)[0, 1:]  # (24, D)
        head = task.head
        fields = []
        for c in range(3):
            vector = head.weight[c] + head.project.weight @ own[c]  # type: ignore[union-attr]
            fields.append((patches @ vector + head.bias[c]).view(4, 6))
        expected = torch.nn.functional.interpolate(
            torch.stack(fields)[None], scale_factor=4, mode="bilinear"
        )
        assert torch.allclose(model(pixels[:1], exact=True)["t"], expected, atol=1e-5)


@pytest.mark.parametrize("mlp", [False, True])
def test_a_head_starts_at_zero_and_reads_the_mean_of_its_tokens(mlp: bool) -> None:
    head = TaskHead(HeadSizes(8, 3, mlp))
    tokens = torch.randn(2, 4, 8)
    assert not head.read(HeadInput(tokens)).any()
    randomise(head)
    assert torch.allclose(head.read(HeadInput(tokens)), head(tokens.mean(1)), atol=1e-6)
    assert torch.equal(head.read(HeadInput(tokens[:, 0])), head(tokens[:, 0]))
    assert (head.hidden is not None) == mlp


def test_numbers_come_in_the_units_of_the_labels() -> None:
    head = NumberHead(HeadSizes(8, 2), ("mean", "std"))
    head.fitted["mean"].copy_(torch.tensor([20.0, 5.0]))
    head.fitted["std"].copy_(torch.tensor([10.0, 1.0]))
    assert head(torch.randn(1, 8)).tolist() == [[20.0, 5.0]]
    torch.nn.init.constant_(head.bias, 1.0)
    assert head(torch.zeros(1, 8)).tolist() == [[30.0, 6.0]]


def test_fitted_buffers_are_found_and_not_trained() -> None:
    head = TaskHead(HeadSizes(8, 3), fitted=("thresholds",))
    assert head.fitted["thresholds"].tolist() == [0.5] * 3
    assert {name for name, _ in head.named_parameters()} == {"weight", "bias"}


def test_without_a_stream_a_mask_is_a_linear_map_of_the_patches() -> None:
    head = randomise(MaskHead(HeadSizes(8, 3)))
    tokens = torch.randn(2, 6, 8)
    field = head.read(HeadInput(torch.randn(2, 1, 8), Patches(tokens, (2, 3), size=(2, 3))))
    assert torch.allclose(field, head(tokens).mT.unflatten(2, (2, 3)), atol=1e-6)
    larger = head.read(HeadInput(torch.randn(2, 1, 8), Patches(tokens, (2, 3), size=(8, 12))))
    assert larger.shape == (2, 3, 8, 12)


def randomise(head: TaskHead) -> TaskHead:
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head
