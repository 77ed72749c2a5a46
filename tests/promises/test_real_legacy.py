"""Checkpoints that the public re-implementation wrote answer here as they did there."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from tests.support.hubs import cached

from engram import EngramError, MemoryViT, load_backbone
from engram.cli import main as cli
from engram.inference.engine import load_model
from engram.store.format import read_engram
from engram.store.legacy import PUBLISHED, PUBLISHED_BASE, PUBLISHED_FILES, convert

# A checkpoint, the expected logits of its tasks, and whom its second task extends.
CHECKPOINTS = [
    ("a_model.pt", ["a"], ()),
    ("b_model.pt", ["b"], ()),
    ("ab_concatenated.pt", ["concatenated.1", "concatenated.2"], ()),
    ("extended.pt", ["extended.1", "extended.2"], ("first",)),
]


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize(("file", "keys", "extends"), CHECKPOINTS, ids=lambda value: str(value))
def test_every_logit_is_reproduced(
    file: str, keys: list[str], extends: tuple[str, ...], exact: bool, assets: Path, tmp_path: Path
) -> None:
    legacy = assets / "legacy"
    expected = load_file(legacy / "expected.safetensors")
    names = ["first", "second"][: len(keys)]
    paths = convert(legacy / file, legacy / "base", tmp_path, names=names)
    model = load_model(paths)
    assert model.task(names[-1]).spec.extends == extends
    with torch.no_grad():
        logits = model(expected["pixel_values"], exact=exact)
    for name, key in zip(names, keys, strict=True):
        torch.testing.assert_close(logits[name], expected[key], atol=1e-5, rtol=0)
    for key in ("base", "concatenated.0", "extended.0"):
        torch.testing.assert_close(logits["base"], expected[key], atol=1e-5, rtol=0)


def test_tasks_that_were_trained_apart_concatenate_here(assets: Path, tmp_path: Path) -> None:
    legacy = assets / "legacy"
    expected = load_file(legacy / "expected.safetensors")
    model = MemoryViT(load_backbone(legacy / "base")).eval()
    for name in ("a", "b"):
        for path in convert(legacy / f"{name}_model.pt", legacy / "base", tmp_path, names=[name]):
            model.attach(path)
    with torch.no_grad():
        logits = model(expected["pixel_values"])
    for name in ("a", "b"):
        torch.testing.assert_close(logits[name], expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("what", ["after the norm", "position 0"])
def test_each_peculiarity_matters(what: str, assets: Path, tmp_path: Path) -> None:
    """Without either of the two, the logits are visibly others: the test above can fail."""
    legacy = assets / "legacy"
    expected = load_file(legacy / "expected.safetensors")
    (path,) = convert(legacy / "a_model.pt", legacy / "base", tmp_path, names=["a"])
    model = load_model(path)
    task = model.task("a")
    with torch.no_grad():
        if what == "after the norm":
            object.__setattr__(task.spec.method, "after_norm", False)
        else:
            assert task.class_token is not None
            assert model.backbone.prefix_position is not None
            task.class_token -= model.backbone.prefix_position[0]
        logits = model(expected["pixel_values"])
    assert float((logits["a"] - expected["a"]).abs().max()) > 1e-3


def in_cache(cache: Path, legacy: Path) -> str:
    """The four files of the assets under the names of the four published ones, and their base."""
    base = {path.name: path.read_bytes() for path in (legacy / "base").iterdir()}
    cached(cache, PUBLISHED_BASE, base)
    written = ("a_model.pt", "b_model.pt", "ab_concatenated.pt", "extended.pt")
    files = {
        name: (legacy / file).read_bytes()
        for name, file in zip(PUBLISHED_FILES, written, strict=True)
    }
    return cached(cache, PUBLISHED, files)


def test_checkpoints_are_read_by_their_hub_name_from_a_cache_laid_out_as_the_hubs(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published ones are larger; the files here were written by the same code."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    legacy = assets / "legacy"
    commit = in_cache(tmp_path / "cache", legacy)
    expected = load_file(legacy / "expected.safetensors")
    (path,) = convert(f"hf:{PUBLISHED}/CIFAR100_model.pt", None, tmp_path / "out")
    engram = read_engram(path)
    assert engram.spec.name == "cifar100"
    assert engram.backbone.source == PUBLISHED_BASE
    assert engram.recipe == {"converted_from": f"hf:{PUBLISHED}@{commit}/CIFAR100_model.pt"}
    assert engram.preprocessing is not None
    assert engram.preprocessing.mean == (0.0, 0.0, 0.0)  # as its authors fed it
    with torch.no_grad():
        logits = load_model(path)(expected["pixel_values"])
    torch.testing.assert_close(logits["cifar100"], expected["a"], atol=1e-5, rtol=0)
    for file, names in (("Places_model.pt", "a,b"), ("Sun_model.pt", "c,d")):
        source, out = f"hf:{PUBLISHED}@{commit}/{file}", tmp_path / file
        arguments = ["convert", source, "--names", names, "--normalised-pixels", "-o", str(out)]
        assert cli.main(arguments) == 0
    (d,) = (tmp_path / "Sun_model.pt").glob("d.safetensors")
    assert read_engram(d).spec.extends == ("c",)


def test_any_repository_with_such_a_checkpoint_is_read(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    legacy = assets / "legacy"
    cached(tmp_path / "cache", "ann/old", {"x/mine.pt": (legacy / "b_model.pt").read_bytes()})
    (path,) = convert("hf:ann/old/x/mine.pt", legacy / "base", tmp_path / "out", names=["mine"])
    assert read_engram(path).spec.name == "mine"
    for source, base, sentence in (
        ("hf:ann/old/x/mine.pt", None, "Which ViT was"),
        ("hf:ann/old", legacy / "base", "name one of its checkpoints"),
        (f"hf:{PUBLISHED}", None, "INaturalist_model.pt"),
        ("hf:ann/old/none.pt", legacy / "base", "has no none.pt"),
        ("hf:ann/older/none.pt", legacy / "base", "offline mode is on"),
    ):
        with pytest.raises(EngramError, match=sentence):
            convert(source, base, tmp_path / "other")
