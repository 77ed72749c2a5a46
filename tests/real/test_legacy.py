"""Checkpoints that the public re-implementation wrote answer here as they did there."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engram import MemoryViT, load_trunk
from engram.bundles import load_model
from engram.legacy import convert

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
    model = MemoryViT(load_trunk(legacy / "base")).eval()
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
            object.__setattr__(task.spec, "after_norm", False)
        else:
            assert task.class_token is not None
            assert model.trunk.prefix_position is not None
            task.class_token -= model.trunk.prefix_position[0]
        logits = model(expected["pixel_values"])
    assert float((logits["a"] - expected["a"]).abs().max()) > 1e-3
