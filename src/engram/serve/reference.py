"""The OpenAPI document as a page that needs no network and no script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any


def reference_page(document: Mapping[str, Any]) -> str:
    """Every operation with its parameters, bodies and answers, as HTML."""
    schemas = document.get("components", {}).get("schemas", {})
    parts = [
        _operation(method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    shapes = [
        f'<section id="{escape(name)}"><h3>{escape(name)}</h3>{_schema(schema)}</section>'
        for name, schema in schemas.items()
        if "Validation" not in name  # the framework's own, which is never sent
    ]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}: reference</title><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="page.css"></head>'
        f'<body class="reference"><header><h1>{title}</h1><p class="quiet">'
        f"{escape(document['info']['description'])} This page is made from "
        '<a href="openapi.json">openapi.json</a>. <a href="./">Try it</a>.</p></header><main>'
        f"{''.join(parts)}<h2>Shapes</h2>{''.join(shapes)}</main></body></html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    locked = ' <span class="tag">token</span>' if operation.get("security") else ""
    about = f"{operation.get('summary', '')}. {operation.get('description', '')}"
    lines = [
        f"<section><h2><code><b>{method.upper()}</b> {escape(path)}</code>{locked}</h2>",
        f"<p>{escape(about)}</p>",
    ]
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        lines.append(f"<h3>Body: <code>{escape(kind)}</code></h3>{_schema(body['schema'])}")
    lines.append("<h3>Answers</h3><table>")
    for code, answer in operation["responses"].items():
        content = answer.get("content", {})
        shape = next((_kind(c.get("schema", {})) for c in content.values()), "")
        about = escape(answer.get("description", ""))
        lines.append(f"<tr><th>{escape(str(code))}</th><td>{shape}</td><td>{about}</td></tr>")
    return "".join([*lines, "</table></section>"])


def _schema(schema: Mapping[str, Any]) -> str:
    if "properties" not in schema:
        return f"<p>{_kind(schema)}</p>"
    needed = schema.get("required", ())
    rows = [
        f"<tr><th>{escape(name)}{'' if name in needed else '?'}</th><td>{_kind(part)}</td>"
        f"<td>{escape(part.get('description', ''))}{_default(part)}</td></tr>"
        for name, part in schema["properties"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _default(part: Mapping[str, Any]) -> str:
    value = part.get("default")
    return "" if value is None else f" (default {escape(json.dumps(value))})"


def _kind(schema: Mapping[str, Any]) -> str:
    """A type in a word or two, with a link where it has a shape of its own."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(_kind(option) for option in options)
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    more = schema.get("additionalProperties")
    if kind == "object" and isinstance(more, dict):
        return f"object of {_kind(more)}"
    return escape(f"{kind} ({schema['format']})" if "format" in schema else kind)
