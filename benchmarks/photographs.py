"""What the scripts that train on photographs share: the assets, and `engram` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ASSETS = Path(os.environ.get("ENGRAM_ASSETS", Path(__file__).parents[2] / "shared"))
TRUNK = ASSETS / "weights" / "vit_tiny_patch16_224" / "timm.safetensors"

if not TRUNK.exists():
    sys.exit(f"There is no {TRUNK}; set ENGRAM_ASSETS to the folder of weights and photographs.")


def run(*arguments: str | Path, cache: Path) -> dict[str, Any]:
    """The JSON document that a command prints, in a process of its own and with its own cache."""
    command = [sys.executable, "-m", "engram", *map(str, arguments), "--json"]
    done = subprocess.run(
        command, env={**os.environ, "ENGRAM_CACHE": str(cache)}, stdout=subprocess.PIPE, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
