"""Merging: the average of engrams of one spec, with its sources recorded, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engrams import familiar, randomised, small_backbone
from tests.support.regimes import known

import engram
from engram import EngramError, MemoryViT, ViT, merge
from engram.store.describe import describe
from engram.store.format import write_engram
from engram.store.merging import normalise_weights

BACKBONE = small_backbone()


def saved(path: Path, backbone: ViT = BACKBONE, name: str = "a", **task: Any) -> Path:
    """An engram with random values."""
    model = MemoryViT(backbone)
    cells = known(task.get("regime", "masked"), cells=2)
    randomised(model.add_task(name, **{"classes": ["rose", "tulip"], **cells, **task}))
    recipe = {"lr": 0.01, "epochs": 3, "data": "flowers"}
    return model.save(name, path, metrics={"val": {"accuracy": 0.5}}, recipe=recipe)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [saved(tmp_path / f"{name}.safetensors") for name in ("one", "two", "three")]


@pytest.mark.parametrize("regime", ["masked", "side", "full", "readout", "memory"])
def test_every_tensor_is_the_weighted_mean(regime: str, tmp_path: Path) -> None:
    files = [saved(tmp_path / f"{i}.safetensors", regime=regime) for i in range(2)]
    merged = merge(files, tmp_path / "merged.safetensors", weights=[0.75, 0.25])
    one, two = map(engram.inspect, files)
    assert merged.tensors.keys() == one.tensors.keys()
    for name, tensor in merged.tensors.items():
        mean = 0.75 * one.tensors[name] + 0.25 * two.tensors[name]
        torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-6)


def test_statistics_of_images_are_not_averaged(tmp_path: Path) -> None:
    """Those of the sources are of other features than the average has."""
    model, known = MemoryViT(BACKBONE), MemoryViT(BACKBONE)
    randomised(model.add_task("a", classes=["rose", "tulip"], cells=2))
    familiar(randomised(known.add_task("a", classes=["rose", "tulip"], cells=2)))
    files = [one.save("a", tmp_path / f"{id(one)}.safetensors") for one in (model, known)]
    merge(files, tmp_path / "merged.safetensors")
    assert not engram.inspect(tmp_path / "merged.safetensors").has_statistics


@pytest.mark.parametrize(
    "settings",
    [{"regime": "head"}, {"regime": "readout", "projected": 3}],
    ids=lambda s: s["regime"],
)
def test_a_mean_of_linear_heads_answers_the_mean(settings: dict[str, Any], tmp_path: Path) -> None:
    """Projections are stacked: a mean of them would be of numbers that mean different things."""
    files = [saved(tmp_path / f"{i}.safetensors", **settings) for i in range(2)]
    merge(files, tmp_path / "merged.safetensors")
    pixels = torch.rand(3, 3, 16, 16)

    def answers(path: Path) -> torch.Tensor:
        model = MemoryViT(BACKBONE)
        model.attach(path)
        logits: torch.Tensor = model(pixels)["a"]
        return logits

    one, two, both = map(answers, (*files, tmp_path / "merged.safetensors"))
    torch.testing.assert_close(both, (one + two) / 2, rtol=0, atol=1e-5)


def test_the_file_names_its_sources_and_claims_no_metric(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "merged.safetensors"
    merge(files, out, weights=[0.5, 0.3, 0.2], task="all")
    found = engram.inspect(out)
    contents = [engram.inspect(path).content for path in files]
    assert found.spec.name == "all"
    assert [source["content"] for source in found.recipe["merged"]] == contents
    assert [source["weight"] for source in found.recipe["merged"]] == [0.5, 0.3, 0.2]
    assert found.recipe["data"] == "flowers"
    assert not found.metrics
    rows = [text for label, text in describe(out).rows if label == "merged from"]
    assert rows[1] == f"a, content {contents[1]}, weight 0.3"


def test_a_merged_engram_can_be_merged_again(files: list[Path], tmp_path: Path) -> None:
    first = merge(files[:2], tmp_path / "first.safetensors")
    merge([tmp_path / "first.safetensors", files[2]], tmp_path / "all.safetensors")
    sources = engram.inspect(tmp_path / "all.safetensors").recipe["merged"]
    assert sources[0]["content"] == first.content


def test_shares_are_the_same_or_as_given() -> None:
    assert normalise_weights([], 4) == [0.25] * 4
    assert normalise_weights([0.33, 0.33, 0.33], 3) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([0.5, 0.5, 0.5], "3 numbers .* for 2 engrams"),
        ([1.0, 1.0], "2 together; .* sum to 1, such as 0.5,0.5"),
        ([1e308, 1e308], "sum to 1, such as 0.5,0.5"),
        ([1.5, -0.5], "above 0"),
        ([float("nan"), 1.0], "above 0"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: list[float], problem: str) -> None:
    with pytest.raises(EngramError, match=problem):
        normalise_weights(weights, 2)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"classes": ["tulip", "rose"]}, "in another order"),
        ({"classes": ["rose", "lily"]}, "only .*one.* has 'tulip'"),
        ({"cells": 3}, "the cells 2"),
        ({"regime": "head"}, "the regime 'masked'"),
        ({"kind": "multilabel"}, "the kind 'classification'"),
        ({"backbone": small_backbone(depth=1)}, "same backbone"),
    ],
)
def test_what_is_no_task_of_the_same_spec_is_refused(
    other: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    one, out = saved(tmp_path / "one.safetensors"), tmp_path / "merged.safetensors"
    with pytest.raises(EngramError, match=problem):
        merge([one, saved(tmp_path / "other.safetensors", **other)], out)
    assert not out.exists()


def test_children_of_different_parents_are_refused(tmp_path: Path) -> None:
    paths = []
    for name in ("one", "two"):
        model = MemoryViT(BACKBONE)
        randomised(model.add_task("base-task", classes=2))
        randomised(model.add_task("a", classes=2, extends=["base-task"]))
        paths.append(model.save("a", tmp_path / f"{name}.safetensors"))
    with pytest.raises(EngramError, match=r"one\.safetensors extends 'base-task' \(content"):
        merge(paths, tmp_path / "merged.safetensors")


def test_one_file_and_the_same_file_twice_are_refused(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "merged.safetensors"
    with pytest.raises(EngramError, match="at least two"):
        merge(files[:1], out)
    copy = write_engram(tmp_path / "copy.safetensors", engram.inspect(files[0]))
    with pytest.raises(EngramError, match="are the same engram"):
        merge([files[0], copy], out)


def test_an_existing_file_is_replaced_only_if_asked(files: list[Path], tmp_path: Path) -> None:
    out = saved(tmp_path / "merged.safetensors")
    with pytest.raises(EngramError, match="exists already"):
        merge(files, out)
    with pytest.raises(EngramError, match="is a folder"):
        merge(files, tmp_path)
    merge(files, out, overwrite=True)
    assert len(engram.inspect(out).recipe["merged"]) == 3
