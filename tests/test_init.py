"""The public names of the package."""

import subprocess
import sys

import pytest

import engram
from engram import EngramError


@pytest.mark.system
def test_the_public_names_are_themselves_whatever_was_imported() -> None:
    code = (
        "import engram.store.format, engram.model, engram\n"
        "assert callable(engram.inspect) and engram.inspect is engram.store.format.read_engram\n"
        "assert set(engram.__all__) <= set(dir(engram))\n"
        "for name in engram.__all__: assert callable(getattr(engram, name)), name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        engram.nothing  # noqa: B018
    assert issubclass(EngramError, Exception)
