"""Write the table of families into docs/backbones.md, from `engram.backbones.families`.

python scripts/document_backbones.py
"""

from __future__ import annotations

import re
from pathlib import Path

from engram.backbones.families import families_table

PAGE = Path(__file__).parents[1] / "docs" / "backbones.md"
PLACE = re.compile(r"(?<=<!-- families -->\n\n).*?(?=\n\n<!-- end of families -->)", re.DOTALL)


def written(page: str) -> str:
    """The page with the table of today."""
    return PLACE.sub(families_table(), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
