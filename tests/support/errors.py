"""Expect a refusal."""

import re
from typing import Any

import pytest

from engram import EngramError


def refuses(sentence: str) -> Any:
    """A block that must raise an EngramError with this text in it."""
    return pytest.raises(EngramError, match=re.escape(sentence))
