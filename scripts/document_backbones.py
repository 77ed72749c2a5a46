"""Write the table of families into docs/backbones.md, from `engram.backbones.families`.

python scripts/document_backbones.py
"""

from __future__ import annotations

import re
from pathlib import Path

from engram.backbones.families import BACKBONE_FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "backbones.md"
PLACE = re.compile(r"(?<=<!-- families -->\n\n).*?(?=\n\n<!-- end of families -->)", re.DOTALL)


def families_table() -> str:
    """The families as a table in Markdown."""
    rows = ["| family | transformers | timm | sizes | licence of the weights | compared with |"]
    rows.append("|---|---|---|---|---|---|")
    for family in BACKBONE_FAMILIES:
        kinds = ", ".join(f"`{kind}`" for kind in family.transformers) or "-"
        cells = (
            family.name,
            kinds,
            family.timm or "-",
            family.sizes,
            family.licence,
            " and ".join(family.compared_with),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def written(page: str) -> str:
    """The page with the table of today."""
    return PLACE.sub(families_table(), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
