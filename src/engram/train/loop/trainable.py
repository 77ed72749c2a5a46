"""Train tasks with a loop of your own, or with transformers' `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from engram.errors import EngramError
from engram.model import MemoryViT


def train_only(model: MemoryViT, *names: str) -> list[tuple[str, nn.Parameter]]:
    """Freeze everything but the parameters of these tasks, for a training loop of your own.

    Statistics of their training images are dropped: what they say will no longer be true.

    Args:
        model: The model.
        *names: The tasks to train.

    Returns:
        The names and parameters that train, for an optimiser.

    Raises:
        EngramError: A task is not attached, or a parameter belongs neither to the backbone nor to a
            task of the model, such as a module of your own put into it. Nothing trains or stays
            frozen by accident.

    Examples:
        >>> parameters = [parameter for _, parameter in engram.train_only(model, "flowers")]
        >>> optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    """
    trained = {id(p) for name in names for p in model.task(name).parameters()}
    owners = (model.backbone, *model.tasks.values())
    known = {id(p) for owner in owners for p in owner.parameters()}
    for path, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise EngramError(
                f"The parameter {path} belongs neither to the backbone nor to a task, so it is "
                "neither trained nor frozen on purpose; remove its module from the model."
            )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    for name in names:
        task = model.task(name)
        task.statistics = task.sums = None  # of features and a head that are about to change
    return [(path, p) for path, p in model.named_parameters() if id(p) in trained]


class ForTrainer(nn.Module):
    """One task of a model, to be trained by transformers' `Trainer`.

    Only the task's parameters train, and only they are in the checkpoints, which `Trainer` can
    resume from. The model that was given has the trained task when `Trainer` is done.

    Args:
        model: The model. Everything in it but the task is frozen.
        task: The name of the task to train.

    Attributes:
        model: The model.
        task: The name of the task.

    Raises:
        EngramError: No task of this name is attached.

    Examples:
        >>> trainer = engram.ForTrainer(model, "flowers")
        >>> out = trainer(torch.rand(2, 3, 32, 32), labels=torch.tensor([0, 1]))
        >>> out.logits.shape, out.loss.requires_grad
        (torch.Size([2, 2]), True)
        >>> path = trainer.save("flowers.safetensors")
    """

    def __init__(self, model: MemoryViT, task: str) -> None:
        super().__init__()
        train_only(model, task)
        self.model, self.task = model, task

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        """The logits of the task, and its loss if there are labels.

        Args:
            pixel_values: Normalised pixels (images, 3, height, width), prepared as
                `model.preprocessing` says.
            labels: What is right: class numbers (images), or for the other kinds of task the
                labels, numbers or masks that `engram.data` gives for them.

        Returns:
            A dict with `logits` and, with labels, `loss`; both are attributes of it as well.
        """
        logits = self.model(pixel_values, tasks=[self.task])[self.task]
        if labels is None:
            return Output(logits=logits)
        task = self.model.task(self.task)
        losses = task.kind.losses(logits, labels, task.head, 0.0, None)
        return Output(loss=losses.mean(), logits=logits)

    def save(
        self,
        path: str | Path,
        *,
        metrics: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the task as an engram: `MemoryViT.save` of this task.

        Args:
            path: The file to write, usually `NAME.safetensors`.
            metrics: Results to record in the file's header, such as `{"test": {"accuracy": 0.9}}`.
            recipe: Training settings to record in the file's header.

        Returns:
            The path.
        """
        return self.model.save(self.task, path, metrics=metrics, recipe=recipe)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The tensors of the task, named as in its engram: what a checkpoint needs."""
        return self.model.task(self.task).state_dict(*args, **options)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` gave."""
        return self.model.task(self.task).load_state_dict(state_dict, strict, assign)


class Output(dict[str, Tensor]):
    """Output of a model for `Trainer`; `loss` and `logits` are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"There is no {name} here, only {', '.join(self)}.") from None
