"""Every kind of task is saved, trained, resumed, swept and answered as the others are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.engrams import randomised, small_backbone
from tests.support.regimes import class_count, known, teaches

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.backbones.shape import BackboneShape
from engram.cli import main as cli
from engram.data.datasets import Splits, load
from engram.inference.evaluate import answers
from engram.methods import METHODS
from engram.store.format import read_engram, write_engram
from engram.tasks.costs import task_costs
from engram.tasks.kinds import KINDS
from engram.tasks.metrics import best_thresholds


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.rand(2, 3, 16, 24)  # not square, and not the backbone's own size


# Its file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", METHODS)
def test_every_kind_comes_back_as_it_was(
    kind: str, regime: str, pixels: torch.Tensor, tmp_path: Path
) -> None:
    if not teaches(regime, kind):
        pytest.skip("the regime teaches no such task")
    model = MemoryViT(small_backbone(patch=4)).eval()
    options: dict[str, Any] = {"values": [1, 2, 7], "ignore": 3} if kind == "segmentation" else {}
    task = randomised(
        model.add_task(
            "t",
            class_count(kind),
            regime=regime,
            kind=kind,
            **known(regime, cells=2, adapter_width=4),
            **options,
        )
    )
    saved = model.save("t", tmp_path / "t.safetensors")
    again = MemoryViT(model.backbone).eval()
    attached = again.attach(saved)
    assert attached.spec == task.spec
    assert torch.equal(again(pixels, exact=True)["t"], model(pixels, exact=True)["t"])
    assert again.engram("t").content == model.engram("t").content
    found = engram.inspect(saved)
    costs = task_costs(BackboneShape.measure(model.backbone), task.spec)
    assert found.parameters == sum(p.numel() for p in task.parameters())
    if regime != "full":
        assert found.parameters == costs.parameters + costs.head_parameters
    names = "1 class (0)" if KINDS[kind].one_class else f"3 {KINDS[kind].nouns[1]} (0, 1, 2)"
    assert str(found).startswith(f"engram t: {kind}, {names}")


@pytest.mark.parametrize("regime", ["masked", "side"])
def test_a_task_extends_one_of_another_kind(
    regime: str, pixels: torch.Tensor, tmp_path: Path
) -> None:
    model = MemoryViT(small_backbone(patch=4)).eval()
    randomised(model.add_task("where", 3, 2, kind="segmentation", regime=regime))
    randomised(model.add_task("what", 4, 2, extends=["where"], regime=regime))
    assert model(pixels)["what"].shape == (2, 4)
    files = [model.save(name, tmp_path / f"{name}.safetensors") for name in ("where", "what")]
    again = MemoryViT(model.backbone).eval()
    for file in files:
        again.attach(file)
    assert torch.equal(again(pixels, exact=True)["what"], model(pixels, exact=True)["what"])


def test_only_the_header_of_segmentation_speaks_of_masks(tmp_path: Path) -> None:
    model = MemoryViT(small_backbone(patch=4))
    for kind in KINDS:
        regime = "patchcore" if KINDS[kind].one_class else "masked"
        model.add_task(kind, class_count(kind), kind=kind, regime=regime)
        header = model.engram(kind).header()["task"]
        assert ("values" in header) == ("ignore" in header) == (kind == "segmentation")


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("multilabel", "head.thresholds"),
        ("regression", "head.mean"),
        ("segmentation", "head.project.weight"),
    ],
)
@pytest.mark.parametrize("wrong", ["missing", "of another shape"])
def test_a_tensor_of_the_wrong_shape_is_damage(
    kind: str, tensor: str, wrong: str, tmp_path: Path
) -> None:
    model = MemoryViT(small_backbone(patch=4))
    model.add_task("t", 3, kind=kind)
    whole = model.engram("t")
    tensors = dict(whole.tensors)
    del tensors[tensor]
    if wrong == "of another shape":
        tensors[tensor] = torch.zeros(2, 5)
    path = write_engram(tmp_path / "t.safetensors", replace(whole, tensors=tensors))
    with pytest.raises(EngramError, match=f"{tensor} has the shape"):
        read_engram(path)


# Training


def boxes(root: Path, images: int = 40) -> Path:
    """Bright boxes on dark noise: images/, masks/ (1 ground, 7 box, 9 ignored) and a table."""
    rng = np.random.default_rng(0)
    rows = []
    for split, count in (("train", images), ("test", images // 2)):
        for folder in ("images", "masks"):
            (root / folder / split).mkdir(parents=True)
        for i in range(count):
            left, top, side = (*rng.integers(0, 8, 2).tolist(), int(rng.integers(6, 14)))
            pixels = rng.integers(0, 60, (20, 20, 3)).astype(np.uint8)
            mask = np.ones((20, 20), dtype=np.uint8)
            pixels[top : top + side, left : left + side] = 230
            mask[top : top + side, left : left + side], mask[0] = 7, 9
            if red := int(rng.random() < 0.5):
                pixels[-5:, :, 0] = 255
            Image.fromarray(pixels).save(root / "images" / split / f"{i}.png")
            Image.fromarray(mask).save(root / "masks" / split / f"{i}.png")
            bright = f"{float(pixels.mean()):.3f}"
            rows.append(f"images/{split}/{i}.png,{red},{int(side > 9)},{bright},{split}")
    (root / "table.csv").write_text("path,red,large,light,split\n" + "\n".join(rows) + "\n")
    return root


TERMS: dict[str, dict[str, Any]] = {
    "multilabel": {"label": ["red", "large"]},
    "regression": {"label": "light"},
    "segmentation": {"classes": ["ground", "box"], "values": [1, 7], "ignore": 9},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return boxes(tmp_path_factory.mktemp("boxes"))


def splits_of(data: Path, kind: str) -> Splits:
    return load(data if kind == "segmentation" else data / "table.csv", kind=kind, **TERMS[kind])


@pytest.mark.parametrize("kind", TERMS)
def test_every_kind_learns_and_the_cache_changes_nothing(kind: str, data: Path) -> None:
    splits = splits_of(data, kind)
    found = {}
    for cache in ("on", "off"):
        model = MemoryViT(small_backbone(patch=4))
        model.add_task("t", **splits.task, seed=0)
        recipe = Recipe(epochs=8, lr=0.01, batch=10, cache=cache, workers=0)
        result = engram.fit(model, "t", splits, recipe, test=True)
        score = KINDS[kind].score
        assert result.metrics["test"][score] > {"map": 0.7, "r2": 0.5, "miou": 0.65}[score]
        assert result.history[-1][f"val_{score}"] == result.metrics["val"][score]
        assert result.history[-1]["loss"] < result.history[0]["loss"]
        found[cache] = result.metrics["test"][score]
    assert found["on"] == pytest.approx(found["off"], abs=0.02)  # the cache is in half precision


@pytest.mark.parametrize("regime", ["head", "memory", "masked+adapter", "side"])
def test_segmentation_learns_in_other_regimes(regime: str, data: Path) -> None:
    splits = splits_of(data, "segmentation")
    model = MemoryViT(small_backbone(patch=4))
    model.add_task("t", **splits.task, regime=regime, **known(regime, adapter_width=4), seed=0)
    recipe = Recipe(epochs=6, lr=0.02, batch=10, workers=0)
    # The same class for every pixel would reach 0.5 at most.
    assert engram.fit(model, "t", splits, recipe).metrics["val"]["miou"] > 0.5


@pytest.mark.parametrize("views", [0, 2])
def test_masks_are_augmented_with_their_pictures(views: int, data: Path) -> None:
    splits = splits_of(data, "segmentation")
    model = MemoryViT(small_backbone(patch=4))
    model.add_task("t", **splits.task, seed=0)
    recipe = Recipe(
        epochs=8, lr=0.01, batch=10, workers=0, augment="inception", views=views, min_area=0.5
    )
    assert engram.fit(model, "t", splits, recipe).metrics["val"]["miou"] > 0.6


def test_thresholds_are_chosen_on_validation_and_standards_on_training(data: Path) -> None:
    recipe = Recipe(epochs=2, lr=0.01, workers=0)
    splits = splits_of(data, "multilabel").with_validation()
    model = MemoryViT(small_backbone(patch=4))
    task = model.add_task("t", **splits.task, seed=0)
    engram.fit(model, "t", splits, recipe)
    said = answers(model, splits["val"], "t", workers=0)
    expected = best_thresholds(said.logits, said.labels)
    assert torch.allclose(task.head.fitted["thresholds"], expected, atol=1e-3)

    splits = splits_of(data, "regression").with_validation()
    task = model.add_task("n", **splits.task, seed=0)
    engram.fit(model, "n", splits, recipe)
    labels = splits["train"].labels
    assert task.head.fitted["mean"].tolist() == pytest.approx(labels.mean(0).tolist())
    assert task.head.fitted["std"].tolist() == pytest.approx(labels.std(0).tolist())


@pytest.mark.parametrize("kind", TERMS)
def test_a_sweep_chooses_by_the_score_of_the_kind(kind: str, data: Path, tmp_path: Path) -> None:
    model, splits = MemoryViT(small_backbone(patch=4)), splits_of(data, kind)
    result = engram.sweep(
        model, "t", splits, Recipe(epochs=2, workers=0),
        lrs=[0.03, 1e-6], cells=[2], out=tmp_path / "t.safetensors",
    )  # fmt: skip
    assert result.best.mean == max(setting.mean for setting in result.settings)
    score = KINDS[kind].score
    assert f"val_{score}" in result.to_dict()["settings"][0]
    assert engram.inspect(tmp_path / "t.safetensors").metrics["val"][score] is not None
    assert model.tasks["t"].kind.name == kind


@pytest.mark.parametrize("kind", TERMS)
def test_auto_chooses_by_the_score_of_the_kind(kind: str, data: Path, tmp_path: Path) -> None:
    model, splits = MemoryViT(small_backbone(patch=4)), splits_of(data, kind)
    out, score = tmp_path / "t.safetensors", KINDS[kind].score
    recipe = Recipe(epochs=8, batch=10, workers=0)
    result = engram.auto(model, "t", splits, recipe, out=out, test=True)
    solved = {one.regime for one in result.tried if one.how == "solved"}
    trained = {one.regime for one in result.tried if one.how == "trained"}
    assert solved == (set() if kind == "segmentation" else {"head", "readout"})
    assert trained == {"masked", "masked+adapter", "side"} | ({"head"} - solved)
    assert result.metrics["test"][score] > {"map": 0.7, "r2": 0.5, "miou": 0.5}[score]
    assert engram.inspect(out).spec.kind == kind
    measured = engram.evaluate(model, splits, "t", workers=0)
    assert measured[score] == pytest.approx(result.metrics["test"][score])


@pytest.mark.parametrize("kind", TERMS)
def test_an_interrupted_run_ends_with_the_same_weights(
    kind: str, data: Path, tmp_path: Path
) -> None:
    splits = splits_of(data, kind)
    recipe = Recipe(epochs=2, batch=10, lr=0.01, workers=0, checkpoint_seconds=0.0)
    found = []
    for stop in (None, 3):
        model = MemoryViT(small_backbone(patch=4))
        model.add_task("t", **splits.task, seed=0)
        out = tmp_path / f"{kind}-{stop}.safetensors"

        def progress(what: str, done: int, total: int, note: str = "", stop: Any = stop) -> None:
            if what == "training" and done == stop:
                raise RuntimeError("stopped")

        if stop is not None:
            with pytest.raises(RuntimeError, match="stopped"):
                engram.fit(model, "t", splits, recipe, out=out, progress=progress)
            model = MemoryViT(model.backbone)
            model.add_task("t", **splits.task, seed=0)
        engram.fit(model, "t", splits, recipe, out=out, resume=stop is not None)
        found.append(model.engram("t").content)
    assert found[0] == found[1]


def test_a_task_and_data_of_other_kinds_are_a_sentence(data: Path) -> None:
    splits = splits_of(data, "segmentation")
    model = MemoryViT(small_backbone(patch=4))
    model.add_task("c", 2)
    with pytest.raises(EngramError, match="has the kind classification"):
        engram.fit(model, "c", splits)
    with pytest.raises(EngramError, match="has the kind classification"):
        engram.evaluate(model, splits, "c")
    model.add_task("s", ["ground", "box"], kind="segmentation")
    with pytest.raises(EngramError, match="has the mask values 0, 1 and ignores 255"):
        engram.fit(model, "s", splits)


def test_a_bad_mask_is_named_and_left_out(data: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(data, root)
    masks = [root / "masks" / "train" / f"{i}.png" for i in range(3)]
    for mask in masks:
        Image.fromarray(np.full((20, 20), 5, dtype=np.uint8)).save(mask)
    splits = splits_of(root, "segmentation")
    for cache in ("on", "off"):
        model = MemoryViT(small_backbone(patch=4))
        model.add_task("t", **splits.task, seed=0)
        recipe = Recipe(epochs=1, workers=0, cache=cache, max_bad=0.1)
        result = engram.fit(model, "t", splits, recipe)
        reasons = sorted(result.unreadable.values())
        assert [f"{mask}: the mask holds the value 5" for mask in masks] == [
            reason[: len(f"{masks[0]}: the mask holds the value 5")] for reason in reasons
        ]
        with pytest.raises(EngramError, match="3 of 40 images cannot be read"):
            engram.fit(model, "t", splits, recipe.but(max_bad=0.0))


# The commands


def test_the_commands_know_every_kind(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    engram.save_backbone(small_backbone(patch=4), tmp_path / "vit")

    def run(*arguments: object) -> Any:
        code = cli.main([str(argument) for argument in (*arguments, "--json")])
        out = capsys.readouterr().out
        assert code == 0, out
        return json.loads(out)

    fits = {
        "outline": (data, "--kind", "segmentation", "--classes", "ground=1,box=7", "--ignore", 9),
        "tags": (data / "table.csv", "--kind", "multilabel", "--label", "red,large"),
        "light": (data / "table.csv", "--kind", "regression", "--label", "light"),
    }
    common = ("--backbone", "vit", "--workers", 0, "--epochs", 2, "--lr", 0.01)
    for name, (source, *flags) in fits.items():
        run("fit", source, "--task", name, "-o", f"{name}.safetensors", *flags, *common)
        assert Path(f"{name}.run/report.html").exists()
        assert Path(f"{name}.run/history.csv").exists()
    engrams = [f"{name}.safetensors" for name in fits]
    pairs = [word for name, (source, *_) in fits.items() for word in ("--data", f"{name}={source}")]
    together = run("eval", *engrams, *pairs, "--workers", 0, "--report", "page.html")
    for file, (name, (source, *_)) in zip(engrams, fits.items(), strict=True):
        alone = run("eval", file, "--data", source, "--workers", 0)[name]
        assert alone.keys() == together[name].keys()
        for key in ("loss", model_score(file)):
            assert alone[key] == pytest.approx(together[name][key], abs=1e-5)
    (answer,) = run("predict", *engrams, data / "images" / "test" / "0.png")
    assert answer["tasks"]["outline"]["size"] == [16, 16]
    assert [one["class"] for one in answer["tasks"]["tags"]]
    assert answer["tasks"]["light"][0]["name"] == "light"
    photos = [data / "images" / split / "0.png" for split in ("test", "train")]
    written = run("predict", *engrams, *photos, "--masks", "told")
    assert [one["tasks"]["outline"]["mask"] for one in written] == [
        str(Path("told", name)) for name in ("0.outline.png", "0_.outline.png")
    ]
    with Image.open("told/0.outline.png") as mask:
        counts = np.bincount(np.asarray(mask).ravel(), minlength=2)
    shares = {one["class"]: one["share"] for one in written[0]["tasks"]["outline"]["classes"]}
    assert counts[1] / counts.sum() == pytest.approx(shares["box"], abs=1e-5)
    bundle = run("compose", *engrams, "-o", "bundle")
    assert [one["kind"] for one in bundle["engrams"]] == [
        "segmentation",
        "multilabel",
        "regression",
    ]
    about = run("inspect", "tags.safetensors")
    assert len(about["fitted"]["thresholds"]) == 2
    assert cli.main(["predict", *engrams, str(data / "images" / "test" / "0.png")]) == 0
    assert cli.main(["inspect", "outline.safetensors"]) == 0
    said = capsys.readouterr().out
    assert "ground 1, box 7; ignored: 9" in said
    assert "light" in said


def model_score(file: str) -> str:
    return engram.inspect(file).spec.kind_object.score
