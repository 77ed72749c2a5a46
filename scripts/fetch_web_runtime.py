"""Fetch the npm package onnxruntime-web, which the tests of the exported page and the site copy.

python scripts/fetch_web_runtime.py FOLDER
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import urllib.request
from pathlib import Path

from engram.export.web import RUNTIME

#: As the registry has it (`npm view onnxruntime-web@VERSION dist.integrity`).
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
NAME = f"onnxruntime-web-{RUNTIME}.tgz"


def fetch(folder: Path) -> Path:
    """The archive in the folder, downloaded unless it is there already."""
    path = folder / NAME
    if not path.is_file():
        registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
        with urllib.request.urlopen(f"{registry}/onnxruntime-web/-/{NAME}", timeout=60) as response:
            data = response.read()
        if base64.b64encode(hashlib.sha512(data).digest()).decode() != SHA512:
            raise OSError(f"{NAME} is not the file that was expected: its hash is another")
        path.with_suffix(".part").write_bytes(data)
        path.with_suffix(".part").rename(path)
    return path


if __name__ == "__main__":
    try:
        print(fetch(Path(sys.argv[1])))
    except OSError as error:
        sys.exit(f"onnxruntime-web cannot be fetched ({error}).")
