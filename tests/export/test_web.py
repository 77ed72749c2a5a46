"""The exported page: in a browser without a network it answers as the model does."""

from __future__ import annotations

import base64
import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.engrams import familiar
from tests.support.exports import trace_once
from tests.support.strategies import scatter
from tests.support.web import BRIGHTNESS, StaticHost, answered, opened

import engram
from engram import EngramError, MemoryViT, random_backbone
from engram.export import export_web, write
from engram.images.preprocessing import INTERPOLATIONS, Preprocessing
from engram.images.views import evaluation_view

HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def model() -> MemoryViT:
    """A task of every kind, with names that are no HTML."""
    torch.manual_seed(0)
    backbone = random_backbone(image_size=32, patch=8, width=32, depth=1, heads=2, classes=3)
    backbone.preprocessing = Preprocessing((32, 32), 36)
    model = MemoryViT(backbone)
    model.add_task("plain", ["red", HOSTILE, "blue"], 3)
    model.add_task("labels", ["sea", "sand"], kind="multilabel")
    model.add_task("age", ["years"], kind="regression")
    model.add_task("ground", ["grass", "sky", "sea"], kind="segmentation")
    model.add_task("defects", 1, kind="anomaly", regime="patchcore", bank=5)
    for seed, task in enumerate(model.tasks.values()):
        scatter(task, by=0.3, seed=seed)
    familiar(model.task("plain"))
    return model.eval()


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photos") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((120, 90), Image.Resampling.BICUBIC).save(path)
    return path


def test_the_page_answers_as_the_model_and_without_a_network(
    browser: Any, web_runtime: Path, model: MemoryViT, photo: Path, tmp_path: Path
) -> None:
    export_web(model, tmp_path / "any" / "path", runtime=web_runtime)
    expected = engram.predict(model, photo, tasks=model.output_names())
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    with StaticHost(tmp_path) as host:
        opened(page, f"{host.address}any/path/")
        check(answered(page, photo), expected)
        check_heat_map(page, model, photo)
        assert all(url.startswith((host.address, "blob:")) for url in asked)
    context.set_offline(True)  # and the host is gone
    opened(page, page.url)
    check(answered(page, photo), expected)
    assert page.title() == "Engram"
    assert page.locator("article h3").last.text_content() == "base"
    context.close()


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    plain = expected["tasks"]["plain"]
    assert [row["label"] for row in found["plain"]["rows"]] == [one["class"] for one in plain]
    for name in ("base", "plain", "labels"):
        for row, one in zip(found[name]["rows"], expected["tasks"][name], strict=True):
            assert row["label"] == one["class"]
            assert row["share"] == pytest.approx(one["probability"], abs=0.01)
    [row], [number] = found["age"]["rows"], expected["tasks"]["age"]
    assert float(row["text"]) == pytest.approx(number["value"], abs=0.01)
    shares = {one["class"]: one["share"] for one in expected["tasks"]["ground"]["classes"]}
    for row in found["ground"]["rows"]:
        assert row["share"] == pytest.approx(shares[row["label"]], abs=0.02)
    said = re.search(r"amiliarity (−?[\d.]+)", found["plain"]["text"])
    assert said is not None
    familiarity = float(said[1].replace("−", "-"))
    assert familiarity == pytest.approx(expected["familiarity"]["plain"], abs=0.05)
    assert found["mask"] == [32, 32]


def check_heat_map(page: Any, model: MemoryViT, photo: Path) -> None:
    """It is drawn over the part of the image that the model sees, brightest at the worst patch."""
    page.locator("[data-task='defects'] button").click()
    found = page.evaluate(BRIGHTNESS, "#mask")
    seen = torch.from_numpy(evaluation_view(photo, model.preprocessing))[None]
    with torch.inference_mode():
        distances = model(engram.images.normalise(seen, model.preprocessing))["defects"][0]
    assert np.array(found).shape == distances.shape
    assert int(np.argmax(found)) == int(distances.argmax())
    image, drawn = (page.locator(one).bounding_box() for one in ("#image", "#mask"))
    assert drawn["height"] / image["height"] == pytest.approx(32 / 36, abs=0.02)


SHAPES = [(40, 60), (33, 32), (200, 31), (1, 7), (64, 640), (301, 3)]


def test_the_page_prepares_images_to_the_bit(browser: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in SHAPES]
    given = []
    for pixels in images:
        opaque = np.full((*pixels.shape[:2], 1), 255, np.uint8)
        data = base64.b64encode(np.concatenate([pixels, opaque], axis=2).tobytes()).decode()
        given.append([data, pixels.shape[1], pixels.shape[0]])
    shutil.copy(Path(write.__file__).parent / "page" / "preprocess.js", tmp_path)
    (tmp_path / "index.html").write_text("<!doctype html><title>x</title>")
    page = browser.new_page()
    with StaticHost(tmp_path) as host:
        page.goto(host.address)
        for method, resize in product(INTERPOLATIONS, (36, None)):
            settings = Preprocessing((32, 24), resize, method, std=(0.2, 0.3, 0.4))
            found = page.evaluate(PREPARE, [given, json.loads(json.dumps(settings.to_dict()))])
            for pixels, (seen, numbers) in zip(images, found, strict=True):
                expected = evaluation_view(pixels, settings)
                assert np.array_equal(np.array(seen, np.uint8).reshape(expected.shape), expected)
                normalised = engram.images.normalise(torch.from_numpy(expected)[None], settings)[0]
                assert torch.tensor(numbers).view_as(normalised).sub(normalised).abs().max() < 1e-6
    page.close()


PREPARE = """async ([given, settings]) => {
    const { view, normalise } = await import("./preprocess.js");
    return given.map(([data, width, height]) => {
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        const seen = view(bytes, width, height, settings);
        return [[...seen], [...normalise(seen, settings)]];
    });
}"""


def test_the_folder_is_replaced_whole_or_not_at_all(
    model: MemoryViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_once(monkeypatch)
    folder = tmp_path / "site"
    made = export_web(model, folder, tasks=["plain"])
    assert "cdn.jsdelivr.net" in made.runtime
    site = json.loads((folder / "model.json").read_text())
    assert list(site["about"]["tasks"]) == ["plain"]
    assert HOSTILE not in (folder / "index.html").read_text()
    assert made.model.stat().st_size == made.model_bytes == site["bytes"]
    with pytest.raises(EngramError, match="overwrite"):
        export_web(model, folder)
    (folder / "left.txt").touch()
    export_web(model, folder, tasks=["plain"], weights="float32", overwrite=True)
    assert not (folder / "left.txt").exists()
    assert json.loads((folder / "model.json").read_text())["runtime"]["webgpu"]
    other = tmp_path / "photos"
    other.mkdir()
    (other / "mine.txt").touch()
    with pytest.raises(EngramError, match="other files"):
        export_web(model, other, overwrite=True)
    with pytest.raises(EngramError, match="float16, int8, float32"):
        export_web(model, tmp_path / "new", weights="bf16")
    with pytest.raises(EngramError, match="npm pack onnxruntime-web"):
        export_web(model, tmp_path / "new", runtime=other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "site"]
