"""The OpenAPI document as a page that needs no network and no script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engram.util.templates import render


def reference_page(document: Mapping[str, Any]) -> str:
    """Every operation with its bodies and responses, and all schemas, as HTML."""
    schemas = document.get("components", {}).get("schemas", {})
    return render(
        "engram.serve",
        "reference.html.j2",
        document=document,
        # The framework lists its own schemas of a failed validation, which is never sent.
        schemas={name: schema for name, schema in schemas.items() if "Validation" not in name},
    )
