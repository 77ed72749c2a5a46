"""Pictures of every kind become the right pixels, and bad ones a sentence that names them."""

import contextlib
import io
import json
import math
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open

from engram.errors import EngramError
from engram.export import standalone
from engram.images.decode import MAX_PIXELS, BadImage, image_size, read_image
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view, pad_crop, random_box, training_view

SMALL = Preprocessing(size=(8, 8), resize=10)
SQUASH = Preprocessing(size=(8, 8), resize=None)


def gradient(width: int = 40, height: int = 30) -> Image.Image:
    """Red grows to the right, green grows downwards, blue is constant."""
    red = np.linspace(0, 255, width)[None].repeat(height, 0)
    green = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    blue = np.full((height, width), 100.0)
    return Image.fromarray(np.rint(np.stack([red, green, blue], -1)).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def pixel(image: Image.Image, x: int = 0, y: int = 0) -> tuple[int, ...]:
    assert image.mode == "RGB"
    value = image.getpixel((x, y))
    assert isinstance(value, tuple)
    return value


# ---------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_usual_format_is_read_as_rgb(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"picture.{format.lower()}"
    gradient().save(path, format)
    for source in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes())):
        image = read_image(source)
        assert (image.mode, image.size) == ("RGB", (40, 30))


def test_cmyk_jpeg_has_its_colours() -> None:
    cmyk = Image.new("RGB", (16, 16), (200, 30, 30)).convert("CMYK")
    red, green, blue = pixel(read_image(encoded(cmyk, "JPEG", quality=95)), 8, 8)
    assert red > 150
    assert max(green, blue) < 80


def test_sixteen_bit_gray_is_scaled_not_clipped() -> None:
    deep = Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16))
    image = read_image(encoded(deep, "PNG"))
    assert [pixel(image, x)[0] for x in range(4)] == [0, 1, 128, 255]


def test_a_pgm_of_sixteen_bits_is_scaled_too() -> None:
    pgm = b"P5 2 1 65535\n" + struct.pack(">2H", 0, 32896)
    assert pixel(read_image(pgm), 1) == (128, 128, 128)


@pytest.mark.parametrize("kind", ["<u2", ">u2", "<i4", "<f4"])
def test_deep_gray_is_the_same_in_parts_and_takes_little_memory(kind: str) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (300, 700)).astype(kind)
    values.flat[:65536] = np.arange(65536)  # every value there is
    brightest = 1 if kind == "<f4" else 65535
    values = (values / (65535 / brightest)).astype(kind)
    modes = {"<u2": "I;16", ">u2": "I;16B", "<i4": "I", "<f4": "F"}
    image = Image.frombytes(modes[kind], (700, 300), values.tobytes())
    expected = np.rint(values.astype(np.float64) * (255 / brightest)).astype(np.uint8)
    for read in (read_image, lambda i: standalone.decode(i, SQUASH.to_dict())[0]):
        tracemalloc.start()
        found = np.asarray(read(image))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(found, np.stack([expected] * 3, axis=-1))
        assert peak < 16 * values.size, peak / values.size  # bytes a pixel


def test_float_gray_outside_zero_to_one_is_refused() -> None:
    bright = encoded(Image.fromarray(np.array([[0.0, 7.0]], dtype=np.float32)), "TIFF")
    with pytest.raises(BadImage, match="gray values from 0 to 7; expected 0 to 1"):
        read_image(bright)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode: str) -> None:
    if mode == "P":
        image = Image.new("P", (4, 4), 0)
        image.putpalette([10, 20, 30, 40, 50, 60])
        data = encoded(image, "PNG", transparency=0)
    else:
        data = encoded(Image.new(mode, (4, 4), 0), "PNG")
    assert pixel(read_image(data)) == (255, 255, 255)


def test_half_transparent_red_over_white_is_pink() -> None:
    data = encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128)), "PNG")
    assert pixel(read_image(data)) == (255, 127, 127)


def test_an_opaque_palette_keeps_its_colours() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    assert pixel(read_image(encoded(image, "PNG"))) == (40, 50, 60)


def test_an_animation_gives_its_first_frame() -> None:
    first, second = Image.new("RGB", (5, 5), "red"), Image.new("RGB", (5, 5), "blue")
    data = encoded(first, "GIF", save_all=True, append_images=[second])
    assert pixel(read_image(data)) == (255, 0, 0)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(orientation: int, format: str) -> None:
    turns = Image.Transpose
    inverse = [
        None,
        turns.FLIP_LEFT_RIGHT,
        turns.ROTATE_180,
        turns.FLIP_TOP_BOTTOM,
        turns.TRANSPOSE,
        turns.ROTATE_90,
        turns.TRANSVERSE,
        turns.ROTATE_270,
    ][orientation - 1]
    upright = gradient()
    stored = upright if inverse is None else upright.transpose(inverse)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))
    assert image_size(data) == upright.size
    assert np.array_equal(np.asarray(read_image(data)), np.asarray(upright))
    assert np.array_equal(evaluation_view(data, SMALL), evaluation_view(upright, SMALL))


def test_broken_exif_does_not_make_a_picture_bad() -> None:
    data = encoded(gradient(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert read_image(data).size == (40, 30)


def test_one_pixel_is_a_picture() -> None:
    view = evaluation_view(encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG"), SMALL)
    assert view.shape == (8, 8, 3)
    assert (view == (9, 8, 7)).all()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header claims a size and whose body is nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


BAD = {
    "zero.jpg": (b"", "the file is empty"),
    "text.jpg": (b"this is no picture", "not an image"),
    "truncated.jpg": (encoded(gradient(400, 300), "JPEG")[:3000], "truncated"),
    "truncated.png": (encoded(gradient(400, 300), "PNG")[:500], "truncated"),
    "bomb.png": (png_of_size(60000, 60000), f"limit of {MAX_PIXELS:,}"),
    "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_sentence_that_names_it(tmp_path: Path, name: str) -> None:
    data, reason = BAD[name]
    path = tmp_path / name
    path.write_bytes(data)
    for attempt in (read_image, lambda source: evaluation_view(source, SMALL)):
        with pytest.raises(BadImage, match=reason) as caught:
            attempt(path)
        assert str(caught.value).startswith(str(path))
    with pytest.raises(BadImage, match="row 7"):
        read_image(data, name="row 7")


def test_a_missing_file_and_a_folder_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"gone\.jpg: the file does not exist"):
        read_image(tmp_path / "gone.jpg")
    with pytest.raises(BadImage, match="directory"):
        read_image(tmp_path)


def test_the_pixel_limit_is_checked_before_decoding() -> None:
    with pytest.raises(BadImage, match="40x30 pixels are more than the limit of 1,000"):
        read_image(encoded(gradient(), "JPEG"), max_pixels=1000)


@given(st.binary(max_size=64), st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "TIFF"]), st.data())
def test_damaged_bytes_never_raise_anything_but_bad_image(
    noise: bytes, format: str, data: st.DataObject
) -> None:
    picture = bytearray(encoded(gradient(), format))
    at = data.draw(st.integers(0, len(picture)))
    picture[at : at + len(noise)] = noise
    with contextlib.suppress(BadImage):
        assert read_image(bytes(picture)).mode == "RGB"


# ------------------------------------------------------------------------------- views


def test_the_evaluation_view_agrees_with_the_reference(assets: Path) -> None:
    file: Any = safe_open(assets / "weights/vit_tiny_patch16_224/reference.safetensors", "pt")
    names = json.loads(file.metadata()["images"])
    preprocessing = Preprocessing()
    views = [evaluation_view(assets / "data" / name, preprocessing) for name in names]
    ours = normalise(torch.from_numpy(np.stack(views)), preprocessing)
    difference = (ours - file.get_tensor("pixel_values")).abs() * 127.5  # in steps of 1/255
    assert difference.mean() < 0.01
    assert difference.max() <= 2.01


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([SMALL, SQUASH]))
def test_one_resize_with_a_box_is_resize_then_crop(
    width: int, height: int, preprocessing: Preprocessing
) -> None:
    image = gradient(width, height)
    if preprocessing.resize is None:
        expected = image.resize((8, 8), Image.Resampling.BICUBIC)
    else:
        scale = 10 / min(width, height)
        resized = image.resize(
            (round(width * scale), round(height * scale)), Image.Resampling.BICUBIC
        )
        left, top = (resized.width - 8) // 2, (resized.height - 8) // 2
        expected = resized.crop((left, top, left + 8, top + 8))
    view = evaluation_view(image, preprocessing)
    assert np.abs(view.astype(int) - np.asarray(expected).astype(int)).max() <= 2


def test_decoding_a_large_jpeg_at_a_fraction_loses_nothing_visible() -> None:
    data = encoded(gradient(1600, 1200), "JPEG", quality=95)
    whole = evaluation_view(read_image(data), SMALL)
    assert np.abs(evaluation_view(data, SMALL).astype(int) - whole).max() <= 3


@pytest.mark.parametrize("augment", ["none", "inception", "pad-crop"])
def test_a_training_view_depends_on_the_generator_alone(augment: str) -> None:
    data = encoded(gradient(), "PNG")

    def views(seed: int) -> list[bytes]:
        rng = np.random.default_rng(seed)
        return [training_view(data, SMALL, rng, augment).tobytes() for _ in range(5)]

    assert views(1) == views(1)
    assert (views(1) == views(2)) == (augment == "none")


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32), st.floats(0.05, 1))
def test_a_random_crop_lies_inside_any_picture(
    width: int, height: int, seed: int, min_area: float
) -> None:
    image = Image.new("RGB", (width, height), (1, 2, 3))
    view = training_view(image, SMALL, np.random.default_rng(seed), min_area=min_area)
    assert (view == (1, 2, 3)).all()


def test_crops_are_mirrored_half_of_the_time_unless_told_not_to() -> None:
    image = gradient()
    rng = np.random.default_rng(0)

    def mirrored(flip: bool) -> float:
        views = [training_view(image, SMALL, rng, flip=flip).astype(int) for _ in range(200)]
        return float(np.mean([view[0, 0, 0] > view[0, -1, 0] for view in views]))

    assert 0.35 < mirrored(True) < 0.65
    assert mirrored(False) == 0


def test_crops_cover_the_areas_and_shapes_they_should() -> None:
    rng = np.random.default_rng(0)
    boxes = [random_box(400, 400, rng, 0.25) for _ in range(500)]
    areas = [(r - x) * (b - y) / 400**2 for x, y, r, b in boxes]
    aspects = [(r - x) / (b - y) for x, y, r, b in boxes]
    assert 0.24 < min(areas) < 0.3
    assert 0.9 < max(areas) <= 1
    assert min(aspects) < 0.8
    assert max(aspects) > 1.25
    assert all(0.74 < aspect < 1.35 for aspect in aspects)
    assert abs(np.mean(np.log(aspects))) < math.log(1.05)


def test_pad_crop_shifts_the_whole_picture_over_black() -> None:
    white = Image.new("RGB", (32, 32), "white")
    preprocessing = Preprocessing(size=(32, 32), resize=None)
    rng = np.random.default_rng(0)
    kept = [pad_crop(white, preprocessing, rng)[..., 0] == 255 for _ in range(100)]
    rows = [int(view.any(1).sum()) for view in kept]
    assert (min(rows), max(rows)) == (28, 32)  # up to 4 of 32 pixels


def test_a_caller_keeps_the_picture_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "large.jpg"
    gradient(800, 600).save(path)
    with Image.open(path) as image:
        evaluation_view(image, SMALL)
        assert image.size == (800, 600)


# ----------------------------------------------------------------------- preprocessing


def test_normalise_shifts_and_scales_each_channel() -> None:
    preprocessing = Preprocessing(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    batch = torch.randint(0, 256, (2, 5, 7, 3), dtype=torch.uint8)
    pixels = normalise(batch, preprocessing)
    expected = (batch / 255 - torch.tensor(preprocessing.mean)) / torch.tensor(preprocessing.std)
    assert pixels.shape == (2, 3, 5, 7)
    assert pixels.is_contiguous()
    torch.testing.assert_close(pixels, expected.permute(0, 3, 1, 2))
    assert normalise(pixels, preprocessing) is pixels


def test_preprocessing_survives_json() -> None:
    preprocessing = Preprocessing((192, 224), None, "lanczos", (0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    again = Preprocessing.from_dict(json.loads(json.dumps(preprocessing.to_dict())))
    assert again == preprocessing
    assert hash(again) == hash(preprocessing)


def test_another_size_keeps_the_share_of_the_margin() -> None:
    assert Preprocessing().with_size((384, 384)).resize == 425
    assert Preprocessing(resize=224).with_size((32, 32)).resize == 32
    assert SQUASH.with_size((16, 16)).resize is None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": (0, 8)}, "size must be two positive numbers"),
        ({"size": (256, 224)}, "resize is 248, but a crop of 256x224 needs at least 256"),
        ({"interpolation": "cubist"}, "interpolation is 'cubist'; it can be nearest"),
        ({"std": (0.5, 0.5, 0.0)}, "std above zero"),
        ({"mean": (0.5,)}, "three numbers each"),
        ({"crop": 3}, "unknown preprocessing setting: crop"),
        ({"size": 224}, "wrong type"),
    ],
)
def test_a_senseless_setting_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        Preprocessing.from_dict(settings)


def test_an_unknown_augmentation_is_refused() -> None:
    with pytest.raises(EngramError, match="augment is 'mixup'; it can be none, inception"):
        training_view(gradient(), SMALL, np.random.default_rng(0), "mixup")
