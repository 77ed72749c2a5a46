"""Warnings of other libraries stay out of the way."""

import io
import warnings

import pytest
from PIL import Image

from engram.images.decode import read_image
from engram.util.worker_processes import ignore_pillow_warnings


@pytest.mark.system
def test_pillow_warns_of_nothing(recwarn: object) -> None:
    data = io.BytesIO()
    Image.new("1", (10_000, 9_000)).save(data, "PNG")  # enough pixels for Pillow's warning
    with warnings.catch_warnings(record=True) as loud:
        warnings.simplefilter("always")
        read_image(data.getvalue())
    assert [type(one.message) for one in loud] == [Image.DecompressionBombWarning]
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        ignore_pillow_warnings()
        read_image(data.getvalue())
        warnings.warn("ours", stacklevel=1)
    assert [str(one.message) for one in quiet] == ["ours"]
