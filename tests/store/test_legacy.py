"""Legacy checkpoints become engrams; other files are refused, and never run."""

import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engram import EngramError
from engram.inference.engine import load_model
from engram.methods import Masked
from engram.store.format import read_engram
from engram.store.legacy import convert

WIDTH, DEPTH, PATCHES, CELLS, CLASSES = 16, 2, 4, (3, 0, 2), (5, 4, 6)
State = dict[str, Tensor]


def old_base() -> State:
    """A ViT's tensors under transformers' names."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, WIDTH),
        "embeddings.position_embeddings": (1, PATCHES + 1, WIDTH),
        "embeddings.patch_embeddings.projection.weight": (WIDTH, 3, 8, 8),
        "embeddings.patch_embeddings.projection.bias": (WIDTH,),
        "layernorm.weight": (WIDTH,),
        "layernorm.bias": (WIDTH,),
    }
    for layer in range(DEPTH):
        for name, rows, columns in [
            ("attention.attention.query", WIDTH, WIDTH),
            ("attention.attention.key", WIDTH, WIDTH),
            ("attention.attention.value", WIDTH, WIDTH),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", 32, WIDTH),
            ("output.dense", WIDTH, 32),
        ]:
            shapes[f"encoder.layer.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"encoder.layer.{layer}.{name}.bias"] = (rows,)
        for norm in ("layernorm_before", "layernorm_after"):
            shapes[f"encoder.layer.{layer}.{norm}.weight"] = (WIDTH,)
            shapes[f"encoder.layer.{layer}.{norm}.bias"] = (WIDTH,)
    return {f"vit.{name}": torch.randn(shape) * 0.2 for name, shape in shapes.items()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(old_base(), folder / "model.safetensors")
    config = {
        "model_type": "vit",
        "image_size": 16,
        "patch_size": 8,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def old_checkpoint(base: Path, reads: Callable[[int, int], bool]) -> State:
    """Three tasks added to the base; `reads(i, j)`: whether task i reads task j."""
    from safetensors.torch import load_file

    state = load_file(base / "model.safetensors")
    state["vit.embeddings.cls_tokens.0"] = state.pop("vit.embeddings.cls_token")
    state["classifiers.0.weight"] = torch.randn(7, WIDTH)
    state["classifiers.0.bias"] = torch.randn(7)
    n, tasks = PATCHES + 1, len(CELLS)
    owner = [*range(tasks), *(i for i, m in enumerate(CELLS) for _ in range(m))]
    mask = torch.full((1, n + tasks, n + len(owner)), -math.inf)
    mask[:, :, :n] = 0
    for i in range(tasks):
        for column, j in enumerate(owner):
            if reads(i, j):
                mask[:, n + i, n + column] = 0
        state[f"vit.embeddings.cls_tokens.{i + 1}"] = torch.randn(1, 1, WIDTH)
        state[f"classifiers.{i + 1}.weight"] = torch.randn(CLASSES[i], WIDTH)
        state[f"classifiers.{i + 1}.bias"] = torch.randn(CLASSES[i])
    for layer in range(DEPTH):
        place = f"vit.encoder.layer.{layer}.attention.attention."
        state[place + "attention_mask"] = mask.clone()
        for i, m in enumerate(CELLS):
            state[f"{place}memory_tokens.{i}"] = torch.randn(1, m, WIDTH) * 0.02
    return state


@pytest.fixture
def state(base: Path) -> State:
    return old_checkpoint(base, lambda i, j: i == j)


def save(state: Any, tmp_path: Path) -> Path:
    torch.save(state, tmp_path / "old.pt")
    return tmp_path / "old.pt"


@pytest.mark.parametrize(
    ("reads", "extends"),
    [
        (lambda i, j: i == j, [(), (), ()]),  # concatenated
        (lambda i, j: j <= i, [(), ("task-1",), ("task-2",)]),  # extended: a chain
        (lambda i, j: j == i or (i, j) == (2, 0), [(), (), ("task-1",)]),  # both at once
        (lambda i, j: j == i or i == 2, [(), (), ("task-1", "task-2")]),
    ],
    ids=["concatenated", "extended", "mixed", "two parents"],
)
def test_the_mask_tells_who_reads_whom(
    reads: Callable[[int, int], bool], extends: list[tuple[str, ...]], base: Path, tmp_path: Path
) -> None:
    path = save(old_checkpoint(base, reads), tmp_path)
    engrams = [read_engram(p) for p in convert(path, base, tmp_path / "out")]
    assert [engram.spec.extends for engram in engrams] == extends
    methods = [engram.spec.method for engram in engrams]
    assert methods == [Masked(cells, tokens=1, after_norm=True) for cells in CELLS]


def test_tensors_are_those_of_the_checkpoint(state: State, base: Path, tmp_path: Path) -> None:
    paths = convert(save(state, tmp_path), base, tmp_path / "out", names=["x", "y", "z"])
    assert [path.name for path in paths] == ["x.safetensors", "y.safetensors", "z.safetensors"]
    z = read_engram(paths[2])
    assert torch.equal(z.tensors["class_token"], state["vit.embeddings.cls_tokens.3"][0])
    assert torch.equal(z.tensors["head.weight"], state["classifiers.3.weight"])
    for layer in range(DEPTH):
        name = f"vit.encoder.layer.{layer}.attention.attention.memory_tokens.2"
        assert torch.equal(z.tensors["cells"][layer], state[name][0])
    assert load_model(paths)(torch.rand(1, 3, 16, 16))["z"].shape == (1, CLASSES[2])


def test_raw_pixels_are_told_to_whoever_loads_it(state: State, base: Path, tmp_path: Path) -> None:
    path = convert(save(state, tmp_path), base, tmp_path / "out", raw_pixels=True)[0]
    preprocessing = load_model(path).backbone.preprocessing
    assert preprocessing is not None
    assert (preprocessing.mean, preprocessing.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_converting_again_changes_nothing_but_never_another_engram(
    state: State, base: Path, tmp_path: Path
) -> None:
    convert(save(state, tmp_path), base, tmp_path / "out")
    convert(tmp_path / "old.pt", base, tmp_path / "out")
    state["classifiers.1.bias"] += 1
    with pytest.raises(EngramError, match="another engram"):
        convert(save(state, tmp_path), base, tmp_path / "out")


def without(state: State, ending: str) -> State:
    return {name: tensor for name, tensor in state.items() if not name.endswith(ending)}


def changed(state: State, name: str, value: Tensor) -> State:
    assert name in state
    return {**state, name: value}


MASK = "vit.encoder.layer.1.attention.attention.attention_mask"
WRONG: dict[str, tuple[Callable[[State], Any], str]] = {
    "another base": (
        lambda s: changed(s, "vit.layernorm.bias", s["vit.layernorm.bias"] + 1),
        "was not trained on .* differs from the base's by up to 1",
    ),
    "another class token": (
        lambda s: changed(s, "vit.embeddings.cls_tokens.0", torch.zeros(1, 1, WIDTH)),
        "was not trained on",
    ),
    "another shape": (
        lambda s: changed(s, "vit.layernorm.bias", torch.zeros(8)),
        r"has the shape \(8,\), in the base \(16,\)",
    ),
    "a layer fewer": (lambda s: without(s, "layer.1.output.dense.weight"), "is missing"),
    "a tensor more": (lambda s: {**s, "vit.pooled": torch.zeros(1)}, "vit.pooled is unknown"),
    "a plain ViT": (lambda s: without(s, "cls_tokens.0"), "not a checkpoint of"),
    "no tasks": (
        lambda s: {n: t for n, t in s.items() if "cls_tokens" not in n or n.endswith(".0")},
        "no tasks",
    ),
    "no head": (lambda s: without(s, "classifiers.2.bias"), "incomplete"),
    "no cells": (lambda s: without(s, "layer.1.attention.attention.memory_tokens.0"), "incomplete"),
    "odd cells": (
        lambda s: changed(s, MASK.replace("attention_mask", "memory_tokens.0"), torch.zeros(1)),
        "shape",
    ),
    "no bias": (lambda s: changed(s, "classifiers.1.bias", torch.tensor(0.0)), "shape"),
    "no masks": (lambda s: without(s, "attention_mask"), "attention mask"),
    "masks that differ": (lambda s: changed(s, MASK, s[MASK] * 0), "layer to layer"),
    "not a number": (
        lambda s: changed(s, "classifiers.1.bias", torch.full((CLASSES[0],), math.nan)),
        "not finite",
    ),
    "not tensors": (lambda s: {**s, "epoch": 3}, "not a state_dict"),
    "a list": (lambda s: list(s.values()), "not a state_dict"),
    "sparse": (lambda s: {**s, "x": torch.zeros(3).to_sparse()}, "not a plain tensor"),
    "a bomb": (
        lambda s: changed(s, "vit.layernorm.bias", torch.zeros(1).expand(10**13)),
        "more values than it holds",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_converted_is_refused(
    change: Callable[[State], Any], sentence: str, state: State, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngramError, match=sentence) as caught:
        convert(save(change(state), tmp_path), base, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out/*"))


def test_masks_that_are_not_table_1_are_refused(state: State, base: Path, tmp_path: Path) -> None:
    for name in [name for name in state if name.endswith("attention_mask")]:
        state[name] = torch.zeros_like(state[name])  # every token reads every cell
    with pytest.raises(EngramError, match="Table 1"):
        convert(save(state, tmp_path), base, tmp_path / "out")


def test_a_task_cannot_read_a_later_one(base: Path, tmp_path: Path) -> None:
    state = old_checkpoint(base, lambda i, j: j == i or (i, j) == (0, 1))
    with pytest.raises(EngramError, match="unknown way"):
        convert(save(state, tmp_path), base, tmp_path / "out")


def test_names_must_fit(state: State, base: Path, tmp_path: Path) -> None:
    path = save(state, tmp_path)
    with pytest.raises(EngramError, match="has 3 tasks"):
        convert(path, base, tmp_path / "out", names=["a", "b"])
    with pytest.raises(EngramError, match="cannot name a task"):
        convert(path, base, tmp_path / "out", names=["a", "b", "../c"])


class Payload:
    """Unpickled without care, it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("bare", [False, True], ids=["in torch's zip", "a bare pickle"])
def test_a_malicious_pickle_does_not_run(bare: bool, base: Path, tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "old.pt"
    if bare:
        path.write_bytes(pickle.dumps({"vit.layernorm.bias": Payload(marker)}))
    else:
        torch.save({"vit.layernorm.bias": Payload(marker)}, path)
    with pytest.raises(EngramError, match=r"could run code|not a PyTorch checkpoint") as caught:
        convert(path, base, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    torch.load(path, weights_only=False) if not bare else pickle.loads(path.read_bytes())
    assert marker.exists()  # the payload is a real one


@pytest.mark.parametrize("size", [0, 1, 100, 1000, 5000])
def test_a_truncated_checkpoint_is_refused(
    size: int, state: State, base: Path, tmp_path: Path
) -> None:
    path = save(state, tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(EngramError, match=r"old\.pt") as caught:
        convert(path, base, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_expands_too_far_is_refused(
    state: State, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state, tmp_path / "old.pt")
    with zipfile.ZipFile(tmp_path / "old.pt", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("old/data/zeros", bytes(50_000_000))
    monkeypatch.setattr("engram.util.zip_files.MAX_SMALL", 1_000_000)
    with pytest.raises(EngramError, match="expands to 50 MB"):
        convert(tmp_path / "old.pt", base, tmp_path / "out")


def test_a_missing_checkpoint_is_a_sentence(base: Path, tmp_path: Path) -> None:
    with pytest.raises(EngramError, match="No such file"):
        convert(tmp_path / "none.pt", base, tmp_path / "out")
