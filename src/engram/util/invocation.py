"""The name of this program in commands that are printed to be run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """`engram` if that runs this installation, else the path of its script, or `python -m engram`.

    A path below the current folder is relative to it, such as `.venv/bin/engram`.
    """
    script = Path(sys.executable).with_name("engram.exe" if os.name == "nt" else "engram")
    on_path = shutil.which("engram")
    if not script.exists():
        return "engram" if on_path else f"{shlex.quote(sys.executable)} -m engram"
    if on_path and os.path.samefile(on_path, script):
        return "engram"
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return shlex.quote(str(script))
