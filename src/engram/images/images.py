"""Pictures in, pixels out: decoding that is safe against bad files, and the views a ViT sees.

Every view is one decode and one resize: the crop is worked out from the header, JPEGs are decoded
at a fraction of their size where that loses nothing, and the crop is resized straight to the
target. Pixels stay uint8 until `normalise`, which works on a whole batch.
"""

import colorsys
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError

from engram.errors import EngramError

Pixels: TypeAlias = npt.NDArray[np.uint8]  # (height, width, 3)
ImageSource: TypeAlias = (
    str | os.PathLike[str] | bytes | IO[bytes] | Image.Image | npt.NDArray[np.uint8]
)
Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom

#: The most pixels a picture may have, read from its header before anything is decoded: 537 MB as
#: RGB, and the size at which Pillow itself refuses. Every camera phone stays below it.
MAX_PIXELS = 178_956_970

#: How many values a mask can hold: those of 16 bits.
MASK_VALUES = 2**16

Image.init()
#: The formats that are opened. Pillow knows more; some of them start other programs.
FORMATS: list[str] = [
    name
    for name in ("JPEG", "PNG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
    if name in Image.OPEN
]

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

AUGMENTATIONS = ("none", "inception", "pad-crop")

# A JPEG is decoded at 1/2, 1/4 or 1/8 only while it stays this much larger than what is asked
# for: the decoder's own reduction is a box filter, and the resize after it hides the difference.
_DRAFT_MARGIN = 2.0

_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(EngramError):
    """A picture that cannot be used; the sentence names it and says why."""


class LargeImage(BadImage):
    """A picture with more pixels than are allowed."""


@dataclass(frozen=True)
class Preprocessing:
    """What a trunk expects of its pictures. The defaults are those of AugReg ViTs at 224 pixels.

    `size` is (height, width). `resize` is the length of the short side before the centre crop;
    None squashes the whole picture to `size`. A setting that makes no sense is an EngramError.
    """

    size: tuple[int, int] = (224, 224)
    resize: int | None = 248
    interpolation: str = "bicubic"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):  # lists, as JSON has them, are welcome
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.size) != 2 or min(self.size) < 1:
            raise EngramError(f"size must be two positive numbers (height, width), not {self.size}")
        if self.resize is not None and self.resize < max(self.size):
            raise EngramError(
                f"resize is {self.resize}, but a crop of {self.size[0]}x{self.size[1]} needs at "
                f"least {max(self.size)}; use None to squash the whole picture"
            )
        if self.interpolation not in INTERPOLATIONS:
            known = ", ".join(INTERPOLATIONS)
            raise EngramError(f"interpolation is {self.interpolation!r}; it can be {known}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise EngramError(
                "mean and std must be three numbers each, and std above zero; "
                f"got {self.mean} and {self.std}"
            )

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON has them: lists instead of tuples."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """The inverse of `to_dict`; an unknown or ill-typed setting is an EngramError."""
        unknown = sorted(set(settings) - {field.name for field in fields(cls)})
        if unknown:
            raise EngramError(f"unknown preprocessing setting: {', '.join(unknown)}")
        try:
            return cls(**settings)
        except TypeError as error:
            raise EngramError(f"preprocessing settings have a wrong type: {error}") from error

    def with_size(self, size: tuple[int, int]) -> "Preprocessing":
        """The same preprocessing at another size; the margin around the crop keeps its share."""
        if self.resize is None:
            return replace(self, size=size)
        resize = max(round(self.resize * max(size) / max(self.size)), *size)
        return replace(self, size=size, resize=resize)


# ------------------------------------------------------------------------------- decoding


def read_image(
    source: ImageSource, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """The picture as RGB, upright, wholly decoded. Whatever is wrong with it is a BadImage.

    Transparency is laid over white, 16-bit gray is scaled to 8 bits, an animation gives its first
    frame, the EXIF orientation is applied. `name` is what the sentence calls the picture.
    """
    with _opened(source, name, max_pixels) as image:
        return _upright(_to_rgb(image), _orientation(image))


@contextmanager
def _opened(source: ImageSource, name: str | None, max_pixels: int) -> Iterator[Image.Image]:
    """The picture with only its header read; anything Pillow raises inside becomes a BadImage."""
    if name is None:
        name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the given image"
    try:
        if isinstance(source, Image.Image):
            yield source
        elif isinstance(source, np.ndarray):
            yield Image.fromarray(source)
        else:
            stream = io.BytesIO(source) if isinstance(source, bytes) else source
            with Image.open(stream, formats=FORMATS) as image:
                if image.width * image.height > max_pixels:
                    raise LargeImage(
                        f"{name}: {image.width}x{image.height} pixels are more than the limit "
                        f"of {max_pixels:,}"
                    )
                yield image
    except EngramError:
        raise
    except FileNotFoundError as error:
        raise BadImage(f"{name}: the file does not exist") from error
    except Image.DecompressionBombError as error:
        raise LargeImage(f"{name}: more than the limit of {max_pixels:,} pixels") from error
    except UnidentifiedImageError as error:
        empty = isinstance(source, (str, os.PathLike)) and os.path.getsize(source) == 0
        reason = "the file is empty" if empty or source == b"" else "not an image that can be read"
        raise BadImage(f"{name}: {reason}") from error
    except Exception as error:  # on hostile bytes Pillow's decoders raise nearly anything
        raise BadImage(f"{name}: {str(error) or type(error).__name__}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16 bits, whatever the container
        return _gray(image, 65535)
    if image.mode == "F":
        return _gray(image, 1)
    if image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return white
    return image.convert("RGB")


def _gray(image: Image.Image, brightest: int) -> Image.Image:
    values = np.asarray(image)
    if not (values.min() >= 0 and values.max() <= brightest):
        raise ValueError(
            f"gray values from {values.min():g} to {values.max():g}; expected 0 to {brightest}"
        )
    gray = np.empty(values.shape, np.uint8)
    part = 2**16  # at a time: doubles of all pixels would take 8 bytes for each
    for start in range(0, values.size, part):
        some = values.reshape(-1)[start : start + part].astype(np.float64)
        gray.reshape(-1)[start : start + part] = np.rint(some * (255 / brightest))
    return Image.fromarray(gray).convert("RGB")


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":  # Pillow turns these upright itself, and tells their upright size
        return 1
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # broken metadata does not make the picture bad
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    turn = _ORIENTATIONS.get(orientation)
    return image if turn is None else image.transpose(turn)


# ---------------------------------------------------------------------------------- views


def evaluation_view(
    source: ImageSource, preprocessing: Preprocessing, *, name: str | None = None
) -> Pixels:
    """Resize and centre crop: the same pixels every time. A bad picture is a BadImage."""
    return _view(source, lambda w, h: evaluation_box(w, h, preprocessing), preprocessing, name)


def evaluation_box(width: int, height: int, preprocessing: Preprocessing) -> Box:
    """The part of an upright picture that `evaluation_view` shows, in the picture's pixels."""
    if preprocessing.resize is None:
        return (0, 0, width, height)
    # The crop of the resized picture, in the coordinates of the original.
    scale = preprocessing.resize / min(width, height)
    wide, high = round(width * scale), round(height * scale)
    crop_high, crop_wide = preprocessing.size
    left, top = (wide - crop_wide) // 2, (high - crop_high) // 2
    x, y = width / wide, height / high
    return (left * x, top * y, (left + crop_wide) * x, (top + crop_high) * y)


def training_view(
    source: ImageSource,
    preprocessing: Preprocessing,
    rng: np.random.Generator,
    augment: str = "inception",
    *,
    flip: bool = True,
    min_area: float = 0.08,
    name: str | None = None,
) -> Pixels:
    """A random view that depends on nothing but `rng`. A bad picture is a BadImage.

    "inception" crops a random `min_area`..1 of the picture at an aspect of 3/4..4/3; "pad-crop"
    shifts the whole picture by up to an eighth of its size over black, for small pictures; "none"
    is the evaluation view. The first two mirror half of the views unless `flip` is False.
    """
    if augment == "none":
        return evaluation_view(source, preprocessing, name=name)
    if augment == "inception":
        view = _view(source, lambda w, h: _random_box(w, h, rng, min_area), preprocessing, name)
    elif augment == "pad-crop":
        view = pad_crop(source, preprocessing, rng, name=name)
    else:
        raise EngramError(f"augment is {augment!r}; it can be {', '.join(AUGMENTATIONS)}")
    if flip and rng.random() < 0.5:
        view = np.ascontiguousarray(view[:, ::-1])
    return view


def pad_crop(
    source: ImageSource,
    preprocessing: Preprocessing,
    rng: np.random.Generator,
    *,
    share: float = 0.125,  # 4 pixels of a CIFAR picture's 32
    name: str | None = None,
) -> Pixels:
    """The picture at the target size, padded with black by `share` and cropped at random."""
    height, width = preprocessing.size
    view = _view(source, lambda w, h: _centred_box(w, h, width / height), preprocessing, name)
    pad_y, pad_x = round(share * height), round(share * width)
    top, left = int(rng.integers(2 * pad_y + 1)), int(rng.integers(2 * pad_x + 1))
    padded = np.pad(view, ((pad_y, pad_y), (pad_x, pad_x), (0, 0)))
    return np.ascontiguousarray(padded[top : top + height, left : left + width])


def _random_box(width: int, height: int, rng: np.random.Generator, min_area: float) -> Box:
    for _ in range(10):
        area = rng.uniform(min_area, 1) * width * height
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return (left, top, left + w, top + h)
    return _centred_box(width, height, 4 / 3 if width > height else 3 / 4)  # a very long picture


def _centred_box(width: int, height: int, aspect: float) -> Box:
    """The largest centred part of this shape."""
    w, h = min(width, height * aspect), min(height, width / aspect)
    return ((width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2)


def _view(
    source: ImageSource,
    place: Callable[[int, int], Box],
    preprocessing: Preprocessing,
    name: str | None,
) -> Pixels:
    """Decode no more than needed, and resize the box that `place` chooses to the target size."""
    high, wide = preprocessing.size
    with _opened(source, name, MAX_PIXELS) as image:
        orientation = _orientation(image)
        width, height = image.size[::-1] if orientation >= 5 else image.size
        left, top, right, bottom = place(width, height)
        if not isinstance(source, Image.Image):  # draft would change the caller's picture
            scale = _DRAFT_MARGIN * max(wide / (right - left), high / (bottom - top))
            if scale < 1:
                image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
        picture = _upright(_to_rgb(image), orientation)
        x, y = picture.width / width, picture.height / height
        right, bottom = min(right * x, picture.width), min(bottom * y, picture.height)  # rounding
        method = INTERPOLATIONS[preprocessing.interpolation]
        return np.array(picture.resize((wide, high), method, (left * x, top * y, right, bottom)))


def palette(classes: int) -> Pixels:
    """A colour (classes, 3) for every class of a mask, the same ones always."""
    hues = [(0.62 + 0.381966 * i) % 1 for i in range(classes)]  # the golden angle: far apart
    return np.array(
        [[int(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.75, 0.95)] for hue in hues],
        dtype=np.uint8,
    ).reshape(-1, 3)


def mask_png(mask: npt.NDArray[np.uint8], classes: int) -> bytes:
    """A PNG whose pixels are the classes (height, width) themselves, shown in `palette`."""
    image = Image.fromarray(mask).convert("L")
    image.putpalette(palette(classes).tobytes())
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


# ---------------------------------------------------------------------------------- masks


def image_size(
    source: ImageSource, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """(width, height) of the picture, upright; only its header is read."""
    with _opened(source, name, max_pixels) as image:
        turned = _orientation(image) >= 5
        return (image.height, image.width) if turned else (image.width, image.height)


def read_mask(
    source: ImageSource, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> npt.NDArray[np.int64]:
    """The value of every pixel (height, width) of a mask. Whatever is wrong is a BadImage.

    A mask has one whole number a pixel, at most 65,535: gray of 8 or 16 bits, black and white (0
    and 1), or a palette, whose numbers count and not its colours.
    """
    with _opened(source, name, max_pixels) as image:
        if image.format == "JPEG":
            raise ValueError("a mask cannot be a JPEG, which changes values; use PNG")
        if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
            raise ValueError(
                f"a mask needs one number a pixel (gray, or a palette), and this is {image.mode}"
            )
        image.load()
        values = np.asarray(_upright(image, _orientation(image))).astype(np.int64)
        for value in (int(values.min()), int(values.max())):
            if not 0 <= value < MASK_VALUES:
                raise ValueError(f"a mask holds values from 0 to 65,535, and this has {value}")
        return values


@dataclass(frozen=True)
class Legend:
    """What the values in masks mean: `values[c]` is class c, `ignore` is nothing at all."""

    values: tuple[int, ...]
    ignore: int

    def read(self, mask: ImageSource, size: tuple[int, int], name: str) -> Image.Image:
        """The mask of a picture of this size (width, height): class + 1 a pixel, 0 for ignored.

        Another size, a value that means nothing, or no pixel that counts is a BadImage.
        """
        found = read_mask(mask, name=name)
        height, width = found.shape
        if (width, height) != size:
            raise BadImage(
                f"{name}: the mask has {width}x{height} pixels, but its picture {size[0]}x{size[1]}"
            )
        table = np.full(MASK_VALUES, -1, dtype=np.int16)
        table[list(self.values)] = np.arange(1, len(self.values) + 1)
        table[self.ignore] = 0
        classes = table[found]
        if (classes < 0).any():
            known = ", ".join(map(str, self.values[:8])) + (", …" if len(self.values) > 8 else "")
            raise BadImage(
                f"{name}: the mask holds the value {found[classes < 0][0]}, which is no class "
                f"({known}) and not the ignored {self.ignore}"
            )
        if not classes.any():
            raise BadImage(
                f"{name}: every pixel of the mask is {self.ignore}, which is ignored; there is "
                "nothing to learn from"
            )
        return Image.fromarray(classes.astype(np.uint8))


def mask_view(
    mask: Image.Image,
    preprocessing: Preprocessing,
    rng: np.random.Generator,
    augment: str = "none",
    *,
    flip: bool = True,
    min_area: float = 0.08,
) -> Pixels:
    """What `training_view` shows of a picture, of its mask (from `Legend.read`): (height, width).

    With an equal `rng` it is the same part, mirrored or not. Pixels are classes, 255 where they
    are ignored; what `pad-crop` adds around the picture is.
    """
    exact = replace(preprocessing, interpolation="nearest")
    view = training_view(mask, exact, rng, augment, flip=flip, min_area=min_area)
    return view[..., 0] - np.uint8(1)  # 0, which is also black, becomes 255


def normalise(batch: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """uint8 (B, H, W, 3) to what the trunk takes: float32 (B, 3, H, W), shifted and scaled.

    A float batch comes from a transform of the user's own and is returned as it is.
    """
    if batch.is_floating_point():
        return batch
    scale = 1 / (255 * torch.tensor(preprocessing.std, device=batch.device))
    shift = torch.tensor(preprocessing.mean, device=batch.device) * 255 * scale
    pixels = batch.permute(0, 3, 1, 2).contiguous().float()
    return pixels.mul_(scale[:, None, None]).sub_(shift[:, None, None])
