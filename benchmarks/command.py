"""Run `engram` commands the way a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_engram(*arguments: str | Path, cache: Path) -> dict[str, Any]:
    """Run a command in its own process with its own cache; return the JSON that it prints."""
    command = [sys.executable, "-m", "engram", *map(str, arguments), "--json"]
    done = subprocess.run(
        command, env={**os.environ, "ENGRAM_CACHE": str(cache)}, stdout=subprocess.PIPE, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document
