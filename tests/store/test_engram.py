"""An engram says what it is, and attaches where it belongs and nowhere else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engrams import randomised, small_backbone
from tests.support.regimes import known

import engram as package
from engram import EngramError, MemoryViT
from engram.images.preprocessing import Preprocessing
from engram.methods import METHODS, Masked
from engram.store.engram import Engram
from engram.store.format import read_engram
from engram.vit import ViT


@pytest.mark.parametrize("regime", METHODS)
def test_every_regime_comes_back_as_it_was(regime: str, backbone: ViT, tmp_path: Path) -> None:
    pixels = torch.rand(2, 3, 16, 16)
    model = MemoryViT(backbone).eval()
    settings = {"kind": "anomaly", "bank": 4} if METHODS[regime].one_class else {}
    classes = 1 if settings else 3
    settings |= known(regime, adapter_width=4)
    task = randomised(model.add_task("t", classes, regime=regime, **settings))
    saved = model.save("t", tmp_path / "t.safetensors")
    again = MemoryViT(backbone).eval()
    attached = again.attach(saved)
    assert attached.spec == task.spec
    for name, tensor in task.tensors().items():
        assert torch.equal(attached.tensors()[name], tensor)
    assert torch.equal(again(pixels, exact=True)["t"], model(pixels, exact=True)["t"])
    assert again.engram("t").content == model.engram("t").content


def test_it_says_what_it_is(path: Path) -> None:
    engram = package.inspect(path)
    assert str(engram).startswith("engram a: classification, 3 classes (rose, tulip, é)\n")
    assert "masked, cells per layer 3" in str(engram)
    assert engram.content[:12] in repr(engram)
    assert len(repr(engram)) < 100


def test_the_content_is_what_decides_the_answer(backbone: ViT, path: Path) -> None:
    engram = read_engram(path)
    for same in (
        replace(engram, metrics={"accuracy": 1.0}, recipe={"lr": 1}, created="", library=""),
        replace(engram, backbone=replace(engram.backbone, source="elsewhere")),
    ):
        assert same.content == engram.content
    for other in (
        replace(engram, spec=replace(engram.spec, method=Masked(3, 1, after_norm=True))),
        replace(engram, spec=replace(engram.spec, classes=("x", "y", "z"))),
        replace(engram, backbone=replace(engram.backbone, fingerprint="0" * 64)),
        replace(engram, preprocessing=None),
        replace(engram, tensors={n: t + (n == "head.bias") for n, t in engram.tensors.items()}),
    ):
        assert other.content != engram.content


def test_metrics_that_json_lacks_are_saved_as_null(backbone: ViT, path: Path) -> None:
    model = MemoryViT(backbone)
    model.attach(path)
    model.save("a", path, metrics={"loss": torch.nan, "when": Path("x"), "each": (1.5, torch.inf)})
    assert read_engram(path).metrics == {"loss": None, "when": "x", "each": [1.5, None]}


def test_names_of_files_that_are_no_text_are_spelled_out(backbone: ViT, path: Path) -> None:
    backbone.source = "/caf\udce9/vit"  # as os.fsdecode has a folder that was named in Latin-1
    model = MemoryViT(backbone)
    model.attach(path)
    model.save("a", path, metrics={"caf\udce9": 1}, recipe={"data": Path("caf\udce9")})
    saved = read_engram(path)
    assert saved.backbone.source == "/caf\\udce9/vit"
    assert saved.metrics == {"caf\\udce9": 1}
    assert saved.recipe == {"data": "caf\\udce9"}


# Promise 4: an engram attaches only where it belongs


def refusal(backbone: ViT, source: Path | Engram) -> str:
    with pytest.raises(EngramError) as caught:
        MemoryViT(backbone).attach(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_backbone_is_refused_by_both_names(backbone: ViT, path: Path) -> None:
    other = small_backbone(seed=1)
    backbone.source, other.source = "mine", "theirs"
    sentence = refusal(other, path)
    assert "random (seed 0)" in sentence  # as the file says
    assert "theirs" in sentence
    assert backbone.fingerprint[:12] in sentence
    assert other.fingerprint[:12] in sentence


def test_one_changed_number_is_another_backbone(backbone: ViT, path: Path) -> None:
    with torch.no_grad():
        backbone.layers[0].qkv.bias[3] += 1e-4
    assert "was trained on" in refusal(backbone, path)


def test_another_head_is_the_same_backbone(backbone: ViT, path: Path) -> None:
    pixels = torch.rand(2, 3, 16, 16)
    expected = MemoryViT(backbone)
    expected.attach(path)
    for classes in (0, 77):
        model = MemoryViT(small_backbone(classes=classes))
        model.attach(path)
        assert torch.equal(model(pixels, tasks=["a"])["a"], expected(pixels, tasks=["a"])["a"])


@pytest.mark.parametrize(
    ("options", "words"), [({"heads": 4}, "heads 2"), ({"activation": "quick_gelu"}, "gelu")]
)
def test_the_same_tensors_read_in_another_way_are_refused(
    options: dict[str, Any], words: str, backbone: ViT, path: Path
) -> None:
    other = small_backbone(**options)
    assert other.fingerprint == backbone.fingerprint
    sentence = refusal(other, path)
    assert words in sentence
    assert str(next(iter(options.values()))) in sentence


def test_another_preprocessing_is_refused_by_both(backbone: ViT, path: Path) -> None:
    backbone.preprocessing = Preprocessing((16, 16), 18)
    sentence = refusal(backbone, path)
    assert '"resize": null' in sentence
    assert '"resize": 18' in sentence
    backbone.preprocessing = None
    assert "none" in refusal(backbone, path)


def test_positions_resized_in_another_way_are_refused(backbone: ViT, tmp_path: Path) -> None:
    larger = Preprocessing((24, 24), None)
    backbone.preprocessing = larger
    model = MemoryViT(backbone)
    model.add_task("t", classes=2)
    saved = model.save("t", tmp_path / "t.safetensors")
    other = small_backbone(antialias=False)
    other.preprocessing = larger
    assert "antialias=True" in refusal(other, saved)


def test_parents_must_be_attached_with_the_right_content(backbone: ViT, tmp_path: Path) -> None:
    model = MemoryViT(backbone)
    parent = randomised(model.add_task("parent", classes=2))
    model.add_task("child", classes=2, extends=["parent"])
    old = model.save("parent", tmp_path / "old.safetensors")
    child = model.save("child", tmp_path / "child.safetensors")
    with torch.no_grad():
        parent.head.bias += 1
    new = model.save("parent", tmp_path / "new.safetensors")
    assert "extends 'parent'" in refusal(backbone, child)

    other = MemoryViT(backbone)
    other.attach(new)
    with pytest.raises(EngramError) as caught:
        other.attach(child)
    assert read_engram(old).content[:12] in str(caught.value)
    assert read_engram(new).content[:12] in str(caught.value)

    right = MemoryViT(backbone)
    right.attach(old)
    assert right.attach(child).spec.extends == ("parent",)
