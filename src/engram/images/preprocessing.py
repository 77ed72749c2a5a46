"""How images become the input of a trunk: size, interpolation, normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from PIL import Image

from engram.errors import EngramError

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True)
class Preprocessing:
    """How a trunk expects its images. The defaults are those of AugReg ViTs at 224 pixels.

    A setting that is out of range is an EngramError.

    Args:
        size: (height, width) of the input.
        resize: Length of the short side before the centre crop. None squashes the whole image
            to `size`, whatever its aspect ratio.
        interpolation: How images are resized, such as "bicubic" or "bilinear".
        mean: Subtracted from each channel, after scaling to 0..1.
        std: Each channel is divided by it.
    """

    size: tuple[int, int] = (224, 224)
    resize: int | None = 248
    interpolation: str = "bicubic"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.size) != 2 or min(self.size) < 1:
            raise EngramError(f"size is {self.size}; it must be two positive numbers.")
        if self.resize is not None and self.resize < max(self.size):
            raise EngramError(
                f"resize is {self.resize}, but a crop of {self.size[0]}x{self.size[1]} needs at "
                f"least {max(self.size)}; use None to squash the whole image."
            )
        if self.interpolation not in INTERPOLATIONS:
            known = ", ".join(INTERPOLATIONS)
            raise EngramError(f"interpolation is {self.interpolation!r}; it can be {known}.")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise EngramError(
                "mean and std must be three numbers each, and std above zero; "
                f"got {self.mean} and {self.std}."
            )

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON has them: lists instead of tuples."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Preprocessing:
        """The inverse of `to_dict`; an unknown or ill-typed setting is an EngramError."""
        unknown = sorted(set(settings) - {field.name for field in fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            raise EngramError(
                f"There is no preprocessing setting {unknown[0]!r}; they are {known}."
            )
        try:
            return cls(**settings)
        except TypeError as error:
            raise EngramError(f"Preprocessing settings have a wrong type: {error}.") from error

    def with_size(self, size: tuple[int, int]) -> Preprocessing:
        """The same preprocessing at another size; the margin around the crop scales with it."""
        if self.resize is None:
            return replace(self, size=size)
        resize = max(round(self.resize * max(size) / max(self.size)), *size)
        return replace(self, size=size, resize=resize)


def normalise(batch: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Normalise a batch of images by mean and standard deviation.

    Args:
        batch: uint8 (images, height, width, 3). A float batch comes from a user's own transform and
            is returned unchanged.
        preprocessing: The mean and the standard deviation.

    Returns:
        Pixels for the trunk, float32 (images, 3, height, width).

    Examples:
        >>> images = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
        >>> engram.images.normalise(images, model.preprocessing).shape
        torch.Size([1, 3, 32, 32])
    """
    if batch.is_floating_point():
        return batch
    scale = 1 / (255 * torch.tensor(preprocessing.std, device=batch.device))
    shift = torch.tensor(preprocessing.mean, device=batch.device) * 255 * scale
    pixels = batch.permute(0, 3, 1, 2).contiguous().float()
    return pixels.mul_(scale[:, None, None]).sub_(shift[:, None, None])
