"""Where benchmarks find weights and photographs, and where they write."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Measured numbers and the pages made from them; part of the repository.
RESULTS = ROOT / "benchmarks" / "results"
#: Exported graphs, decoded images, quick runs: everything that is not worth committing.
BUILD = ROOT / "build"
ASSETS = Path(os.environ.get("ENGRAM_ASSETS", ROOT.parent / "shared"))
BACKBONE = ASSETS / "weights" / "vit_tiny_patch16_224" / "timm.safetensors"
#: Larger backbones, which tools/get_backbones.py of the assets puts into a folder.
BACKBONES = Path(os.environ.get("ENGRAM_BACKBONES", BUILD / "backbones"))
DINOV2_SMALL = BACKBONES / "dinov2_small"


def require_backbone() -> None:
    """End the process with one sentence if the weights are missing."""
    if not BACKBONE.exists():
        sys.exit(f"There is no {BACKBONE}; set ENGRAM_ASSETS to the folder of weights and data.")
