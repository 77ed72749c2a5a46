"""predict.py answers as engram does, with onnxruntime and numpy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.exports import Made

import engram
from engram.export import standalone
from engram.images.decode import FORMATS
from engram.images.preprocessing import INTERPOLATIONS, Preprocessing, normalise
from engram.images.views import evaluation_view

METHODS = list(INTERPOLATIONS)


@pytest.mark.parametrize("case", range(30))
def test_the_script_makes_the_same_pixels_as_engram(case: int) -> None:
    """Bit for bit, for every method, shape and size, without Pillow."""
    rng = np.random.default_rng(case)
    width, height = rng.integers(5, 300, 2).tolist()
    high, wide = rng.integers(8, 100, 2).tolist()
    resize = None if case % 3 == 0 else max(high, wide) + int(rng.integers(0, 30))
    how = Preprocessing((high, wide), resize, METHODS[case % 6], (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = evaluation_view(picture, how)
    seen = standalone.view(picture, (width, height), how.to_dict())
    assert np.array_equal(seen, expected)
    pixels = normalise(torch.from_numpy(expected)[None], how)
    assert np.array_equal(standalone.normalise(seen[None], how.to_dict()), pixels.numpy())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(301, 3), (300, 3), (950, 2), (150, 1), (3, 301)])
@pytest.mark.parametrize("resize", [None, 28])
def test_the_script_sees_very_long_pictures_as_pillow_does(
    shape: tuple[int, int], method: str, resize: int | None
) -> None:
    """One that is more than 100 times as high as it is wide is resized in another order."""
    how = Preprocessing((24, 16), resize, method)
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    seen = standalone.view(picture, (shape[1], shape[0]), how.to_dict())
    assert np.array_equal(seen, evaluation_view(picture, how))


def pictures(folder: Path) -> list[Path]:
    """One of every sort that is read in its own way."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    photo = Image.fromarray(noise).resize((1200, 900), Image.Resampling.BICUBIC)
    turned = Image.Exif()
    turned[0x0112] = 6
    photo.save(folder / "large.jpg")
    photo.resize((90, 60)).save(folder / "turned.jpg", exif=turned.tobytes())
    photo.resize((90, 60)).save(folder / "turned.tiff", tiffinfo={0x0112: 6})
    Image.fromarray(noise).save(folder / "colour.ppm")
    Image.fromarray(noise[..., 0]).save(folder / "gray.pgm")
    alpha = np.concatenate([noise, noise[..., :1]], axis=2)
    Image.fromarray(alpha).save(folder / "clear.png")
    Image.fromarray(noise[..., 0].astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(noise).convert("P").save(folder / "few.gif")
    return sorted(path for path in folder.iterdir())


def test_the_script_reads_pictures_as_engram_does(tmp_path: Path) -> None:
    how = Preprocessing((24, 16), 28)
    paths = pictures(tmp_path)
    assert len(paths) == 8
    for path in paths:
        seen = standalone.view(*standalone.read(path, how.to_dict()), how.to_dict())
        assert np.array_equal(seen, evaluation_view(path, how)), path.name


def test_the_script_starts_no_other_program_for_a_picture(tmp_path: Path) -> None:
    assert [name for name in standalone.FORMATS if name in Image.OPEN] == FORMATS
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png", "EPS")  # Pillow runs Ghostscript for it
    with pytest.raises(standalone.Unusable, match="cannot identify image file"):
        standalone.read(tmp_path / "x.png", Preprocessing((8, 8), None).to_dict())


ALONE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import runpy
sys.argv = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(
    script: Path, *arguments: object, blocked: tuple[str, ...] = ("torch", "engram", "PIL")
) -> subprocess.CompletedProcess[str]:
    """predict.py in a process that has neither torch nor engram nor Pillow."""
    code = ALONE.format(blocked=blocked, arguments=[str(script), *map(str, arguments)])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )


def test_the_script_answers_with_onnxruntime_and_numpy_alone(made: Made, tmp_path: Path) -> None:
    assert made.float32.script == made.float32.path.with_name("predict.py")
    pictures(tmp_path)
    array = np.asarray(Image.open(tmp_path / "colour.ppm"))
    np.save(tmp_path / "array.npy", array)
    names = ["colour.ppm", "gray.pgm", "array.npy"]
    done = run_script(
        made.float32.script, *[tmp_path / name for name in names], "--json", "--top-k", 2
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for one, name in zip(results, ["colour.ppm", "gray.pgm", "colour.ppm"], strict=True):
        (expected,) = engram.predict(made.model, [tmp_path / name], top_k=2)
        assert list(one["tasks"]) == ["base", *made.model.tasks]
        for task, best in expected["tasks"].items():
            assert [o["class"] for o in one["tasks"][task]] == [o["class"] for o in best]
            for mine, theirs in zip(one["tasks"][task], best, strict=True):
                assert mine["probability"] == pytest.approx(theirs["probability"], abs=1e-4)


def test_the_script_uses_pillow_where_it_is_and_says_where_it_is_not(
    made: Made, tmp_path: Path
) -> None:
    script = made.int8.script
    assert script is not None
    pictures(tmp_path)
    photo = tmp_path / "large.jpg"
    done = run_script(script, photo, "--task", "plain", blocked=("torch", "engram"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(photo)
    assert "  plain: " in done.stdout
    done = run_script(script, photo, tmp_path / "gone.npy", tmp_path / "colour.ppm", "--json")
    assert done.returncode == 2
    jpeg, gone, colour = json.loads(done.stdout)
    assert "install Pillow to read other images" in jpeg["error"]
    assert gone["error"].endswith("gone.npy: the file does not exist")
    assert set(colour) == {"image", "tasks"}
    done = run_script(script, photo, "--task", "other")
    assert done.returncode == 2
    assert "There is no task 'other'" in done.stderr


@pytest.mark.parametrize("value", [0.5, np.nan])
def test_the_script_prints_no_control_characters_and_no_nan(
    value: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = object.__new__(standalone.Model)
    model.about = {"tasks": {"t": {"kind": "classification", "classes": ["a", "\x1b[2J\u202e"]}}}
    monkeypatch.setattr(standalone, "Model", lambda path: model)
    outputs = {"t": np.array([0.0, value])}, {}
    monkeypatch.setattr(model, "outputs", lambda path, tasks: outputs)
    code = standalone.main(["odd\x1b[2J.png"])
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.splitlines())
    assert r"\x1b[2J" in printed
    assert standalone.main(["odd.png", "--json"]) == code == (2 if np.isnan(value) else 0)
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
