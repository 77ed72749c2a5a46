"""Packages that only some users need; where one is missing, the error says how to install it."""

import importlib
import importlib.metadata
import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from engram.errors import EngramError

_PACKAGE = "engram-vit"


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
            f"install it with {how_to_install(extra, missing)}."
        ) from error


def how_to_install(extra: str, missing: str) -> str:
    """The command that installs what an extra needs, however this package was installed.

    It names the packages themselves: a clone or a wheel is on no index. The tested versions hold
    where the package was installed from a clone that has them. An installation that is older than
    the extra has only the name of the package that is missing.
    """
    wanted = " ".join(shlex.quote(one) for one in _requirements(extra) or [missing])
    pins = _constraints()
    return f"pip install {f'-c {shlex.quote(str(pins))} ' if pins else ''}{wanted}"


def _requirements(extra: str) -> list[str]:
    """The packages of an extra, those of other extras that it names included."""
    found: dict[str, None] = {}
    for requirement in importlib.metadata.requires(_PACKAGE) or ():
        wanted, _, condition = (part.strip() for part in requirement.partition(";"))
        if not re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", condition):
            continue
        own = re.fullmatch(rf"{_PACKAGE}\[(.+)\]", wanted)
        names = [one for other in own[1].split(",") for one in _requirements(other)] if own else ()
        found |= dict.fromkeys(names or [wanted])
    return list(found)


def _constraints() -> Path | None:
    """The constraints.txt of the folder that this package was installed from."""
    text = importlib.metadata.distribution(_PACKAGE).read_text("direct_url.json")
    address = json.loads(text)["url"] if text else ""
    pins = Path(unquote(urlsplit(address).path)) / "constraints.txt"
    return pins if address.startswith("file:") and pins.is_file() else None
