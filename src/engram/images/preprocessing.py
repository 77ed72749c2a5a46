"""Preprocessing of images for a backbone: size, interpolation, normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from PIL import Image

from engram.errors import EngramError
from engram.util.schema import Array, Integer, Invalid, Nullable, Object, Real, String

if TYPE_CHECKING:
    import torch

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

#: The longest side of an image that a backbone takes, in pixels.
MAX_SIDE = 4_096

# Means and standard deviations of pixels from 0 to 1 are far inside of these ranges, and outside
# of them single precision overflows.
SCHEMA = Object(
    optional={
        "size": Array(Integer(1, MAX_SIDE), 2, 2),
        "resize": Nullable(Integer(1, 4 * MAX_SIDE)),
        "interpolation": String(choices=tuple(INTERPOLATIONS)),
        "mean": Array(Real(-1e4, 1e4), 3, 3),
        "std": Array(Real(1e-4, 1e4), 3, 3),
    }
)


@dataclass(frozen=True)
class Preprocessing:
    """Settings of a backbone's input. The defaults are those of AugReg ViTs at 224 pixels.

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
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        try:
            SCHEMA.check(vars(self), "")
        except Invalid as error:
            raise EngramError(f"{error}.") from None
        if self.resize is not None and self.resize < max(self.size):
            raise EngramError(
                f"resize is {self.resize}, but a crop of {self.size[0]}x{self.size[1]} needs at "
                f"least {max(self.size)}; use None to squash the whole image."
            )

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON has them: lists instead of tuples."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Preprocessing:
        """The inverse of `to_dict`; an unknown or wrong setting is an EngramError."""
        unknown = sorted(set(settings) - {field.name for field in fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            raise EngramError(
                f"There is no preprocessing setting {unknown[0]!r}; they are {known}."
            )
        return cls(**settings)

    def with_size(self, size: tuple[int, int]) -> Preprocessing:
        """Preprocessing at another size; the margin around the crop scales with it."""
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
        Pixels for the backbone, float32 (images, 3, height, width).

    Examples:
        >>> images = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
        >>> engram.images.normalise(images, model.preprocessing).shape
        torch.Size([1, 3, 32, 32])
    """
    import torch  # here: a process that only decodes images starts ten times faster without it

    from engram.util.tensors import to_device

    if batch.is_floating_point():
        return batch
    scale = 1 / (255 * to_device(torch.tensor(preprocessing.std), batch.device))
    shift = to_device(torch.tensor(preprocessing.mean), batch.device) * 255 * scale
    pixels = batch.permute(0, 3, 1, 2).contiguous().float()
    return pixels.mul_(scale[:, None, None]).sub_(shift[:, None, None])
