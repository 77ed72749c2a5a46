"""The settings of a table of answers say what is wrong with them."""

from __future__ import annotations

import pytest

from engram import EngramError
from engram.inference.bulk.bulk_settings import BulkSettings


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"batch": 0}, {"rows": 0}, {"decoders": -1}])
def test_a_number_out_of_range_is_named(wrong: dict[str, int]) -> None:
    with pytest.raises(EngramError, match=next(iter(wrong))):
        BulkSettings(**wrong)
