"""transformers' `Trainer` trains one task, and its checkpoints continue."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram import EngramError, ForTrainer, MemoryViT, load_backbone, load_model


class Colours(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, path: Path, split: str) -> None:
        with np.load(path) as arrays:
            self.pixels = torch.from_numpy(arrays[f"x_{split}"]).permute(0, 3, 1, 2) / 127.5 - 1
            self.labels = arrays[f"y_{split}"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[i], "labels": int(self.labels[i])}


def learner(small_backbone: Path) -> ForTrainer:
    model = MemoryViT(load_backbone(small_backbone))
    model.add_task("other", 4, 1, seed=1)
    model.add_task("colours", ["red", "green", "blue"], 2, seed=0)
    return ForTrainer(model, "colours")


def trainer(learner: ForTrainer, colours: Path, out: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(out), max_steps=10, save_steps=5, per_device_train_batch_size=20, learning_rate=0.03,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=5,
    )  # fmt: skip
    return Trainer(
        learner, args,
        train_dataset=Colours(colours, "train"), eval_dataset=Colours(colours, "test"),
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
    )  # fmt: skip


def test_a_trainer_trains_a_task_and_resumes_it(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    first = learner(small_backbone)
    before = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    whole = trainer(first, colours, tmp_path / "run")
    whole.train()
    changed = {n for n, t in first.model.state_dict().items() if not torch.equal(t, before[n])}
    own = dict(first.model.task("colours").named_parameters())
    assert changed == {f"task:colours.{name}" for name in own}
    assert whole.evaluate()["eval_accuracy"] == 1.0
    predicted = whole.predict(Colours(colours, "test"))
    assert predicted.predictions.shape == (21, 3)

    checkpoint = tmp_path / "run" / "checkpoint-5"
    assert (
        checkpoint / "model.safetensors"
    ).stat().st_size < 5_000  # the task, and not the backbone
    second = learner(small_backbone)
    trainer(second, colours, tmp_path / "again").train(resume_from_checkpoint=str(checkpoint))
    ends = [one.state_dict() for one in (first, second)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])

    path = second.save(tmp_path / "colours.safetensors", metrics={"test": {"accuracy": 1.0}})
    pixels = torch.from_numpy(np.stack([one["pixel_values"] for one in Colours(colours, "test")]))
    answers = load_model(path)(pixels, exact=True)["colours"]
    assert torch.equal(answers, second.model(pixels, exact=True)["colours"])
    assert np.allclose(answers.detach(), predicted.predictions, atol=1e-5)


def test_loss_and_logits_come_by_name(small_backbone: Path) -> None:
    one = learner(small_backbone)
    pixels, labels = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
    out = one(pixels, labels=labels)
    assert torch.equal(out.loss, torch.nn.functional.cross_entropy(out["logits"], labels))
    assert set(one(pixel_values=pixels)) == {"logits"}
    with pytest.raises(AttributeError, match="no loss"):
        assert one(pixels).loss


def test_a_task_that_is_not_attached_is_refused(small_backbone: Path) -> None:
    with pytest.raises(EngramError, match="There is no task 'flowers'"):
        ForTrainer(MemoryViT(load_backbone(small_backbone)), "flowers")
