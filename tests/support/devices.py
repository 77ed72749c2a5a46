"""Tests that need an accelerator: run where there is one, shown as skipped where there is none."""

from __future__ import annotations

import pytest
import torch

accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator (cuda, mps or xpu)"
)
