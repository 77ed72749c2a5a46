"""Packages that only some users need; where one is missing, the error says how to install it."""

import importlib
from typing import Any

from engram.errors import EngramError


def require(module: str, *, extra: str, purpose: str) -> Any:
    """Import `module`, which the extra `extra` of this package installs.

    `purpose` begins the error: what needs the module, such as "ONNX export". If the module, or
    one that it needs in turn, is not installed, an EngramError says how to install the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).split(".")[0]
        raise EngramError(
            f"{purpose} needs the package {missing}, which is not installed; "
            f"install it with pip install 'engram-vit[{extra}]'."
        ) from error
