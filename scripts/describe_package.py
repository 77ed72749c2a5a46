"""The README as a package index shows it: without links that lead nowhere there.

A package index shows README.md alone, so a link to docs/ or LICENSE would be dead. hatchling calls
this when it builds; the text of such a link stays, and pictures of the repository are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

NOTE = (
    "*Pages, pictures and files that this text names are in the source distribution and in the "
    "repository.*\n\n"
)
_LOCAL = r"\((?!https?://|#)[^)]*\)"


def for_an_index(markdown: str) -> str:
    """Markdown without pictures and links that are relative, and with a note below the title."""
    text = re.sub(rf"!\[[^\]]*\]{_LOCAL}\n*", "", markdown)
    text = re.sub(rf"\[([^\]]*)\]{_LOCAL}", r"\1", text)
    text = re.sub(r"^<!-- .*? -->\n", "", text, flags=re.MULTILINE)
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n{NOTE}{rest}"


class ReadmeHook(MetadataHookInterface):
    """Gives hatchling the long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(readme)}
