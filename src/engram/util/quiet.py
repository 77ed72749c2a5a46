"""Warnings of other libraries that say nothing to a user of the command line."""

from __future__ import annotations

import warnings


def ignore_pillow_warnings() -> None:
    """In this process, print nothing of what Pillow warns about: odd EXIF data, palettes, sizes.

    An image that cannot be used is an error or is listed as unreadable, with the reason.
    """
    warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
