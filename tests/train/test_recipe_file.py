"""Every run writes the recipe file that repeats it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.training import start

import engram
from engram import MemoryViT, Recipe
from engram.data.datasets import Splits
from engram.train.recipe import read_settings

QUICK = Recipe(steps=2, batch=16, workers=0, lr=0.002)


def test_a_run_writes_what_it_was(small_backbone: Path, splits: Splits, tmp_path: Path) -> None:
    out = tmp_path / "c.safetensors"
    engram.fit(start(small_backbone, splits), "colours", splits, QUICK, out=out)
    path = tmp_path / "c.run" / "recipe.toml"
    assert Recipe.load(path) == QUICK
    said = read_settings(path)
    assert (said["regime"], said["cells"], said["kind"]) == ("masked", 3, "classification")
    assert said["backbone"] == str(small_backbone)
    engram.fit(
        start(small_backbone, splits), "colours", splits, QUICK.but(lr=0), out=out, overwrite=True
    )
    assert read_settings(path)["lr"] == 1e-3  # what it was, not that it was the default
    assert path.read_text().splitlines()[1].startswith("# engram fit DATA --task colours --recipe ")


@pytest.mark.parametrize(
    ("run", "settings", "command", "said"),
    [
        (engram.auto, {"cells": 5}, "fit", {"regime": "auto", "cells": 5}),
        (
            engram.sweep,
            {"regime": "side", "cells": [1, 2], "seeds": 2, "rank": 3},
            "sweep",
            {"regime": "side", "cells": [1, 2], "rank": 3, "lr": 0.002, "seeds": 2, "refit": False},
        ),
    ],
)
def test_so_do_auto_and_a_sweep(
    run: Any, settings: dict[str, Any], command: str, said: dict[str, Any],
    model: MemoryViT, splits: Splits, tmp_path: Path,
) -> None:  # fmt: skip
    run(model, "t", splits, QUICK, **settings, out=tmp_path / "t.safetensors")
    path = tmp_path / "t.run" / "recipe.toml"
    assert said.items() <= read_settings(path).items()
    assert f"engram {command} DATA --task t" in path.read_text()
