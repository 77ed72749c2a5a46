"""Kinds of task: each keeps every promise, in the model, in its file and in what it answers."""

from __future__ import annotations

import base64
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import engram
from engram import EngramError, MemoryViT, Recipe, random_trunk
from engram.cli import main as cli
from engram.data.datasets import Splits, load
from engram.images.preprocessing import Preprocessing
from engram.inference.evaluate import answers
from engram.memory import TrunkPass, forward_tasks
from engram.store.format import read_engram, write_engram
from engram.tasks.costs import task_costs
from engram.tasks.kinds import IGNORED, KINDS
from engram.tasks.metrics import best_thresholds
from engram.tasks.regimes import REGIMES
from engram.tasks.shape import TrunkShape
from engram.tasks.task import Task
from engram.vit import ViT

SHAPES = {
    "classification": (3,),
    "multilabel": (3,),
    "regression": (3,),
    "segmentation": (3, 16, 24),
}
MASKED = [name for name, regime in REGIMES.items() if regime.masked]


def small_trunk(**options: Any) -> ViT:
    given = {"image_size": 16, "patch": 4, "width": 16, "depth": 2, "heads": 2} | options
    trunk = random_trunk(**given)
    trunk.preprocessing = Preprocessing((16, 16), None)
    return trunk


def randomised(task: Task) -> Task:
    with torch.no_grad():
        for tensor in task.tensors().values():
            tensor.normal_()
    return task


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.rand(2, 3, 16, 24)  # not square, and not the trunk's own size


# The model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_kind_answers_in_every_regime(kind: str, regime: str, pixels: torch.Tensor) -> None:
    model = MemoryViT(small_trunk()).eval()
    task = randomised(model.add_task("t", 3, 2, regime=regime, kind=kind, adapter_width=4))
    assert model.tasks["t"].kind.name == kind
    outputs = model(pixels)["t"]
    assert outputs.shape == (2, *SHAPES[kind])
    for parameter in task.parameters():
        parameter.requires_grad_(True)
    model(pixels, tasks=["t"])["t"].square().sum().backward()
    without = {name for name, p in task.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == set()
    json.dumps(task.answer(outputs[0].detach()))


@pytest.mark.parametrize("trunk", [{}, {"class_token": False, "classes": 0}, {"registers": 2}])
@pytest.mark.parametrize("regime", MASKED)
def test_all_kinds_share_a_pass_and_nobody_notices(
    regime: str, trunk: dict[str, Any], pixels: torch.Tensor
) -> None:
    model = MemoryViT(small_trunk(**trunk)).eval()
    plain = model.trunk(pixels) if model.trunk.head is not None else None
    for kind in KINDS:
        randomised(model.add_task(kind, 3, 2, regime=regime, kind=kind, adapter_width=4))
    together, exactly = model(pixels), model(pixels, exact=True)
    if plain is not None:
        assert torch.equal(exactly["base"], plain)
        assert torch.allclose(together["base"], plain, atol=1e-5)
    for kind in KINDS:
        alone = MemoryViT(model.trunk).eval()
        alone.attach(model.engram(kind))
        assert torch.equal(exactly[kind], alone(pixels, exact=True)[kind])
        assert torch.allclose(together[kind], alone(pixels)[kind], atol=1e-5)
        assert torch.allclose(together[kind], exactly[kind], atol=1e-5)


def test_a_class_of_masked_segmentation_is_its_token_times_the_patches(
    pixels: torch.Tensor,
) -> None:
    """Written out for one picture, from the tokens that the model's own memory computes."""
    model = MemoryViT(small_trunk()).eval()
    task = randomised(model.add_task("t", 3, 2, kind="segmentation"))
    assert task.class_token is not None
    assert task.class_token.shape == (3, 16)
    memory, trunk = model.memory(["t"]), model.trunk
    with torch.no_grad():
        x = trunk.embed(pixels[:1])
        run = TrunkPass(trunk, x, x.shape[1])
        own = trunk.norm(forward_tasks(trunk, run, memory, 1))[0]  # (classes, D)
        patches = trunk.norm(run.tokens)[0, 1:]  # (24, D)
        head = task.head
        fields = []
        for c in range(3):
            vector = head.weight[c] + head.project.weight @ own[c]  # type: ignore[union-attr]
            fields.append((patches @ vector + head.bias[c]).view(4, 6))
        expected = torch.nn.functional.interpolate(
            torch.stack(fields)[None], scale_factor=4, mode="bilinear"
        )
        assert torch.allclose(model(pixels[:1], exact=True)["t"], expected, atol=1e-5)


def test_a_task_extends_one_of_another_kind(pixels: torch.Tensor, tmp_path: Path) -> None:
    model = MemoryViT(small_trunk()).eval()
    randomised(model.add_task("where", 3, 2, kind="segmentation"))
    randomised(model.add_task("what", 4, 2, extends=["where"]))
    assert model(pixels)["what"].shape == (2, 4)
    files = [model.save(name, tmp_path / f"{name}.safetensors") for name in ("where", "what")]
    again = MemoryViT(model.trunk).eval()
    for file in files:
        again.attach(file)
    assert torch.equal(again(pixels, exact=True)["what"], model(pixels, exact=True)["what"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "detection"}, "there is no kind of task 'detection'; choose one of classif"),
        ({"kind": "segmentation", "classes": 1}, "segmentation needs at least 2 classes, not 1"),
        ({"kind": "segmentation", "classes": 256}, "256 classes are too many for masks"),
        ({"kind": "segmentation", "tokens": 1}, "one class token a class, not 1 for 3"),
        ({"kind": "segmentation", "values": [1, 2]}, "3 classes need as many values in the masks"),
        ({"kind": "segmentation", "values": [1, 2, 2]}, "all different"),
        ({"kind": "segmentation", "values": [0, 1, 9], "ignore": 9}, "not the ignored 9"),
        ({"kind": "segmentation", "values": [0, 1, -1]}, "whole numbers from 0 to 65,535"),
        ({"kind": "regression", "classes": ["age", "age"]}, "the number 'age' is there twice"),
        ({"values": [0, 1, 2]}, "classification learns from none"),
    ],
)
def test_what_a_kind_cannot_be_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        MemoryViT(small_trunk()).add_task("t", **{"classes": 3} | options)


# Its file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_kind_comes_back_as_it_was(
    kind: str, regime: str, pixels: torch.Tensor, tmp_path: Path
) -> None:
    model = MemoryViT(small_trunk()).eval()
    options: dict[str, Any] = {"values": [1, 2, 7], "ignore": 3} if kind == "segmentation" else {}
    task = randomised(
        model.add_task("t", 3, 2, regime=regime, kind=kind, adapter_width=4, **options)
    )
    saved = model.save("t", tmp_path / "t.safetensors")
    again = MemoryViT(model.trunk).eval()
    attached = again.attach(saved)
    assert attached.spec == task.spec
    assert torch.equal(again(pixels, exact=True)["t"], model(pixels, exact=True)["t"])
    assert again.engram("t").content == model.engram("t").content
    found = engram.inspect(saved)
    costs = task_costs(TrunkShape.of(model.trunk), task.spec)
    assert found.parameters == sum(p.numel() for p in task.parameters())
    if regime != "full":
        assert found.parameters == costs.parameters + costs.head_parameters
    assert str(found).startswith(f"engram t: {kind}, 3 {KINDS[kind].nouns[1]} (0, 1, 2)")


def test_only_the_header_of_segmentation_speaks_of_masks(tmp_path: Path) -> None:
    model = MemoryViT(small_trunk())
    for kind in KINDS:
        model.add_task(kind, 3, kind=kind)
        header = model.engram(kind).header()["task"]
        assert ("values" in header) == ("ignore" in header) == (kind == "segmentation")


@pytest.mark.parametrize("tensor", ["head.thresholds", "head.mean", "head.project.weight"])
def test_a_tensor_of_the_wrong_shape_is_damage(tensor: str, tmp_path: Path) -> None:
    model = MemoryViT(small_trunk())
    for kind in KINDS:
        model.add_task(kind, 3, kind=kind)
        whole = model.engram(kind)
        if tensor not in whole.tensors:
            continue
        for wrong in ({}, {tensor: torch.zeros(2, 5)}):
            tensors = {n: t for n, t in whole.tensors.items() if n != tensor} | wrong
            path = write_engram(tmp_path / "t.safetensors", replace(whole, tensors=tensors))
            with pytest.raises(EngramError, match=f"{tensor} has the shape"):
                read_engram(path)
        return
    raise AssertionError(tensor)


# What it answers


def test_an_answer_with_several_labels_says_which_reach_their_threshold() -> None:
    task = MemoryViT(small_trunk()).add_task("t", ["a", "b", "c", "d"], kind="multilabel")
    task.head.settled["thresholds"].copy_(torch.tensor([0.9, 0.5, 0.1, 0.2]))
    answer = task.answer(torch.tensor([2.0, 1.0, -1.0, -3.0]), top_k=1)
    assert [(one["class"], one["present"]) for one in answer] == [
        ("a", False), ("b", True), ("c", True),
    ]  # fmt: skip
    assert answer[0]["probability"] == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=1e-6)
    assert task.kind.words(answer) == "b 73.1%, c 26.9%"
    assert task.kind.words(task.answer(torch.full((4,), -9.0))) == "none"


def test_numbers_are_answered_in_the_units_of_the_labels() -> None:
    model = MemoryViT(small_trunk()).eval()
    task = model.add_task("t", ["age", "height"], kind="regression")
    task.kind.prepare(task.head, np.array([[10.0, 100.0], [30.0, 100.0]]))
    output = model(torch.rand(1, 3, 16, 16))["t"][0]  # a head of zeros: the mean
    assert task.answer(output) == [{"name": "age", "value": 20.0}, {"name": "height", "value": 100}]
    assert task.head.settled["std"].tolist() == [10.0, 1.0]  # what does not vary stays itself
    assert task.kind.words(task.answer(output)) == "age 20, height 100"
    years = np.stack([np.full(300_000, 37.3), np.arange(300_000) % 11 + 1995.0], 1)
    task.kind.prepare(task.head, years.astype(np.float32))
    assert task.head.settled["mean"].tolist() == pytest.approx([37.3, 2000.0], rel=1e-5)
    assert task.head.settled["std"].tolist() == pytest.approx([1.0, 10**0.5], rel=1e-4)


def test_a_mask_is_answered_as_a_picture_of_its_classes() -> None:
    task = MemoryViT(small_trunk()).add_task("t", ["sky", "sea", "land"], kind="segmentation")
    classes = torch.tensor([[0, 0, 2], [0, 2, 2], [2, 2, 2]])
    output = torch.nn.functional.one_hot(classes, 3).permute(2, 0, 1).float()
    answer = task.answer(output, top_k=2)
    assert answer["classes"] == [
        {"class": "land", "share": pytest.approx(6 / 9, abs=1e-6)},
        {"class": "sky", "share": pytest.approx(3 / 9, abs=1e-6)},
    ]
    assert answer["size"] == [3, 3]
    kind, _, data = answer["mask"].partition(",")
    assert kind == "data:image/png;base64"
    png = Image.open(io.BytesIO(base64.b64decode(data)))
    assert np.asarray(png).tolist() == classes.tolist()
    assert len({png.convert("RGB").getpixel(at) for at in ((0, 0), (2, 2))}) == 2
    assert task.kind.words(answer) == "land 66.7%, sky 33.3%"


# What it learns from


def test_ignored_pixels_teach_nothing() -> None:
    task = MemoryViT(small_trunk()).add_task("t", 3, kind="segmentation")
    outputs = torch.randn(2, 3, 4, 4, requires_grad=True)
    labels = torch.randint(0, 3, (2, 4, 4)).to(torch.uint8)
    labels[0, :2], labels[1] = IGNORED, IGNORED
    loss = task.kind.loss(outputs, labels, task.head, 0.0)
    loss.backward()
    expected = torch.nn.functional.cross_entropy(outputs[:1, :, 2:], labels[:1, 2:].long())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert outputs.grad is not None
    assert not outputs.grad[0, :, :2].any()
    assert not outputs.grad[1].any()
    counts, losses = task.kind.keep(outputs.detach(), labels)
    assert counts[1].sum() == losses[1] == 0


def test_numbers_of_any_size_are_learned_alike() -> None:
    task = MemoryViT(small_trunk()).add_task("t", 2, kind="regression")
    task.head.settled["std"].copy_(torch.tensor([1.0, 1000.0]))
    small, large = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1000.0]])
    nothing = torch.zeros(1, 2)
    first, second = (task.kind.loss(x, nothing, task.head, 0.0) for x in (small, large))
    assert first.item() == second.item() == 0.5


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
        model = MemoryViT(small_trunk())
        model.add_task("t", **splits.task, seed=0)
        recipe = Recipe(epochs=8, lr=0.01, batch=10, cache=cache, workers=0)
        result = engram.fit(model, "t", splits, recipe, test=True)
        score = KINDS[kind].score
        assert result.metrics["test"][score] > {"map": 0.7, "r2": 0.5, "miou": 0.65}[score]
        assert result.history[-1][f"val_{score}"] == result.metrics["val"][score]
        assert result.history[-1]["loss"] < result.history[0]["loss"]
        found[cache] = result.metrics["test"][score]
    assert found["on"] == pytest.approx(found["off"], abs=0.02)  # the cache is in half precision


@pytest.mark.parametrize("regime", ["head", "memory", "masked+adapter"])
def test_segmentation_learns_in_other_regimes(regime: str, data: Path) -> None:
    splits = splits_of(data, "segmentation")
    model = MemoryViT(small_trunk())
    model.add_task("t", **splits.task, regime=regime, adapter_width=4, seed=0)
    recipe = Recipe(epochs=6, lr=0.02, batch=10, workers=0)
    # The same class for every pixel would reach 0.5 at most.
    assert engram.fit(model, "t", splits, recipe).metrics["val"]["miou"] > 0.5


@pytest.mark.parametrize("views", [0, 2])
def test_masks_are_augmented_with_their_pictures(views: int, data: Path) -> None:
    splits = splits_of(data, "segmentation")
    model = MemoryViT(small_trunk())
    model.add_task("t", **splits.task, seed=0)
    recipe = Recipe(
        epochs=8, lr=0.01, batch=10, workers=0, augment="inception", views=views, min_area=0.5
    )
    assert engram.fit(model, "t", splits, recipe).metrics["val"]["miou"] > 0.6


def test_thresholds_are_chosen_on_validation_and_standards_on_training(data: Path) -> None:
    recipe = Recipe(epochs=2, lr=0.01, workers=0)
    splits = splits_of(data, "multilabel").with_validation(recipe.val_share)
    model = MemoryViT(small_trunk())
    task = model.add_task("t", **splits.task, seed=0)
    engram.fit(model, "t", splits, recipe)
    said = answers(model, splits["val"], "t", workers=0)
    expected = best_thresholds(said.logits, said.labels)
    assert torch.allclose(task.head.settled["thresholds"], expected, atol=1e-3)

    splits = splits_of(data, "regression").with_validation(recipe.val_share)
    task = model.add_task("n", **splits.task, seed=0)
    engram.fit(model, "n", splits, recipe)
    labels = splits["train"].labels
    assert task.head.settled["mean"].tolist() == pytest.approx(labels.mean(0).tolist())
    assert task.head.settled["std"].tolist() == pytest.approx(labels.std(0).tolist())


@pytest.mark.parametrize("kind", TERMS)
def test_a_sweep_chooses_by_the_score_of_the_kind(kind: str, data: Path, tmp_path: Path) -> None:
    model, splits = MemoryViT(small_trunk()), splits_of(data, kind)
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
def test_an_interrupted_run_ends_with_the_same_weights(
    kind: str, data: Path, tmp_path: Path
) -> None:
    splits = splits_of(data, kind)
    recipe = Recipe(epochs=2, batch=10, lr=0.01, workers=0, checkpoint_seconds=0.0)
    found = []
    for stop in (None, 3):
        model = MemoryViT(small_trunk())
        model.add_task("t", **splits.task, seed=0)
        out = tmp_path / f"{kind}-{stop}.safetensors"

        def progress(what: str, done: int, total: int, note: str = "", stop: Any = stop) -> None:
            if what == "training" and done == stop:
                raise RuntimeError("stopped")

        if stop is not None:
            with pytest.raises(RuntimeError, match="stopped"):
                engram.fit(model, "t", splits, recipe, out=out, progress=progress)
            model = MemoryViT(model.trunk)
            model.add_task("t", **splits.task, seed=0)
        engram.fit(model, "t", splits, recipe, out=out, resume=True)
        found.append(model.engram("t").content)
    assert found[0] == found[1]


def test_a_task_and_data_of_other_kinds_are_a_sentence(data: Path) -> None:
    splits = splits_of(data, "segmentation")
    model = MemoryViT(small_trunk())
    model.add_task("c", 2)
    with pytest.raises(
        EngramError, match=r"has the kind classification, but .* has the kind segmentation"
    ):
        engram.fit(model, "c", splits)
    with pytest.raises(EngramError, match=r"has the kind classification, but .* has the kind segm"):
        engram.evaluate(model, splits, "c")
    model.add_task("s", ["ground", "box"], kind="segmentation")
    with pytest.raises(EngramError, match=r"has the mask values 0, 1 and ignores 255, but .* has"):
        engram.fit(model, "s", splits)


def test_a_bad_mask_is_named_and_left_out(data: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(data, root)
    mask = root / "masks" / "train" / "0.png"
    Image.fromarray(np.full((20, 20), 5, dtype=np.uint8)).save(mask)
    splits = splits_of(root, "segmentation")
    for cache in ("on", "off"):
        model = MemoryViT(small_trunk())
        model.add_task("t", **splits.task, seed=0)
        recipe = Recipe(epochs=1, workers=0, cache=cache, max_bad=0.1)
        result = engram.fit(model, "t", splits, recipe)
        (reason,) = result.unreadable.values()
        assert reason.startswith(f"{mask}: the mask holds the value 5")
        with pytest.raises(EngramError, match="1 of 40 images cannot be read"):
            engram.fit(model, "t", splits, recipe.but(max_bad=0.0))


# The commands


def test_the_commands_know_every_kind(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    engram.save_trunk(small_trunk(), tmp_path / "vit")

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
    assert len(about["settled"]["thresholds"]) == 2
    assert cli.main(["predict", *engrams, str(data / "images" / "test" / "0.png")]) == 0
    assert cli.main(["inspect", "outline.safetensors"]) == 0
    said = capsys.readouterr().out
    assert "ground 1, box 7; ignored: 9" in said
    assert "light" in said


def model_score(file: str) -> str:
    return engram.inspect(file).spec.does.score


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--kind", "poetry"], "There is no kind of task 'poetry'"),
        (["--kind", "regression", "--ignore", "3"], "--ignore is about masks, and regression has"),
        (["--classes", "a=1,b=2"], "--classes with = is about masks, and classification has none"),
        (["--kind", "segmentation", "--classes", "a=1,b"], "give every class the value"),
    ],
)
def test_flags_that_make_no_sense_are_a_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", "digits", "--task", "t", "-o", "t.safetensors", *flags]) == 2
    assert sentence in capsys.readouterr().err
