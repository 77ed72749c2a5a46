"""The families as random models, made once, in memory and as transformers writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.backbones import FAMILIES, VIT, randomised
from torch import nn


@pytest.fixture(scope="session")
def made() -> Callable[[str], nn.Module]:
    """Each family's random model."""
    models: dict[str, nn.Module] = {}

    def get(family: str) -> nn.Module:
        if family not in models:
            torch.manual_seed(0)
            models[family] = randomised(FAMILIES[family]())
        return models[family]

    return get


@pytest.fixture(scope="session")
def saved(
    made: Callable[[str], nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder that transformers wrote each family's model into. Tests do not change it."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            made(family).save_pretrained(folders[family])
        return folders[family]

    return get


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small transformers folder that a test may change."""
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, num_labels=3))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"
