"""With own_pass, auto tries what changes the backbone's tokens too, on the same held-out images."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import as_written

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits
from engram.train.loop.validation import HeldOut, with_held_out
from engram.train.search import own_pass
from engram.train.search.auto import AutoResult
from engram.train.search.own_pass import OWN_PASS, first_fold, suggestion

QUICK = Recipe(steps=10, batch=16, workers=0, evaluations=2)


@pytest.fixture
def never_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of those with a pass of their own is kept."""

    def best(score: str, tried: list[dict[str, Any]]) -> int:
        return max(range(1, len(tried)), key=lambda i: tried[i][score])

    monkeypatch.setattr(own_pass, "ties", lambda score, tried: [best(score, tried)])
    monkeypatch.setattr(own_pass, "best_of", best)


def tried_own(result: AutoResult) -> list[str]:
    return [one.regime for one in result.tried if one.own_pass]


def test_all_are_tried_and_a_tie_goes_to_what_shares_the_pass(
    model: MemoryViT, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.train.loop.validation.noise", lambda score, metrics: 1.0)
    result = engram.auto(model, "t", splits, QUICK, own_pass=True)
    assert tried_own(result) == list(OWN_PASS)
    assert result.regime not in OWN_PASS
    assert result.metrics["val"]["folds"] == 5
    assert [one.own_pass for one in result.tried if one.kept] == [False]
    assert result.regime in result.own_pass
    model.add_task("another", 2)  # so it shares a pass with others


def test_one_that_is_better_is_kept_and_learns_from_all_images(
    model: MemoryViT, splits: Splits, tmp_path: Path, never_a_tie: None
) -> None:
    out = tmp_path / "t.safetensors"
    result = engram.auto(model, "t", splits, QUICK, out=out, own_pass=True, test=True)
    assert result.regime in OWN_PASS
    (kept,) = (one for one in result.tried if one.kept)
    assert (kept.regime, kept.own_pass) == (result.regime, True)
    val = result.metrics["val"]
    held_out = len(first_fold(with_held_out(splits, QUICK))["val"])
    assert (val["folds"], val["learned_all"], val["images"]) == (1, True, held_out)
    assert val["interval"][0] <= val["accuracy"] <= val["interval"][1]
    assert f"{held_out} held-out images" in result.own_pass
    written = engram.inspect(out)
    assert written.metrics == as_written(result.metrics)
    assert written.recipe["lr"] == kept.lr
    other = MemoryViT(model.backbone)
    other.attach(out)
    again = engram.evaluate(other, splits, "t", workers=0)
    assert again["accuracy"] == result.metrics["test"]["accuracy"]
    assert not list((tmp_path / "t.run").glob("variant-*"))


def test_an_interrupted_run_ends_as_if_it_had_not_been(
    model: MemoryViT, splits: Splits, tmp_path: Path, never_a_tie: None
) -> None:
    """Stopped while the first with a pass of its own trains, or while the best trains again."""
    recipe = QUICK.but(checkpoint_seconds=0)

    def auto(out: str, **options: Any) -> Path:
        path, own = tmp_path / out, MemoryViT(model.backbone)
        engram.auto(own, "t", splits, recipe, out=path, own_pass=True, **options)
        return path

    wanted = engram.inspect(auto("w.safetensors")).content
    for phase in (1, 4):
        steps = [0]  # a training begins where they fall

        def stopping(
            what: str, done: int, total: int, note: str = "", *, steps: Any = steps, at: int = phase
        ) -> None:
            if what.endswith("training"):
                steps.append(done)
                began = sum(after < before for before, after in itertools.pairwise(steps))
                if began == at and done == 2:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            auto(f"{phase}.safetensors", progress=stopping)
        assert engram.inspect(auto(f"{phase}.safetensors", resume=True)).content == wanted


def test_the_first_fold_has_its_images_alone(splits: Splits) -> None:
    several = with_held_out(splits, QUICK)
    one = first_fold(several)
    assert several.folds is not None
    assert one.folds is not None
    assert one.folds.count == 1
    names = [one["val"].sample_name(i) for i in range(len(one["val"]))]
    rows = (several.folds.train == 0).nonzero()[:, 0].tolist()
    assert names == [several["val"].sample_name(i) for i in rows]
    everything = torch.arange(len(several["val"]))
    answers = HeldOut(everything[:, None].double(), everything, everything)
    own = own_pass._of_first_fold(answers, several)
    assert own.labels.tolist() == rows
    assert own.samples.tolist() == list(range(len(rows)))
    learned = own_pass._without_held_out(one)
    assert len(learned["train"]) + len(names) == len(several["train"])


def test_tasks_that_extend_others_have_no_pass_of_their_own(
    model: MemoryViT, splits: Splits
) -> None:
    model.add_task("parent", 2)
    with pytest.raises(EngramError, match="extend no others"):
        engram.auto(model, "t", splits, QUICK, extends=["parent"], own_pass=True)
    with pytest.raises(EngramError, match="cannot share a pass"):
        engram.auto(model, "t", splits, QUICK, own_pass=True)


def test_it_is_suggested_where_even_the_upper_end_is_low() -> None:
    assert "own_pass" in suggestion({"accuracy": 0.6, "interval": [0.5, 0.7]})
    assert not suggestion({"accuracy": 0.7, "interval": [0.55, 0.85]})
    assert not suggestion({"r2": 0.1, "interval": [0.0, 0.2]})
    assert not suggestion({"accuracy": 0.1, "interval": None})
