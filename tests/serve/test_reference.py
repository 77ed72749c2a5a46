"""The reference page: all of the OpenAPI document, escaped, with links that lead somewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.html import Checker

from engram.serve.routes.operations import reference_page

REF = {"$ref": "#/components/schemas/Answer"}


def document(schema: dict[str, Any], **operation: Any) -> dict[str, Any]:
    """A document with one operation, whose body has this schema."""
    body = {"content": {"application/json": {"schema": schema}}}
    responses = {"200": {"description": "Fine", "content": {"application/json": {"schema": REF}}}}
    return {
        "info": {"title": "A <service>", "version": "1", "description": "It answers."},
        "paths": {
            "/ask/{name}": {"post": {"requestBody": body, "responses": responses, **operation}}
        },
        "components": {"schemas": {"Answer": {"type": "object"}, "HTTPValidationError": {}}},
    }


def text(html: str) -> str:
    """Without tags, in words."""
    return " ".join(re.sub("<[^>]*>", " ", html).split())


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "string"),
        ({"type": "string", "format": "binary"}, "string (binary)"),
        ({"type": "array", "items": {"type": "integer"}}, "list of integer"),
        ({"type": "array"}, "list of anything"),
        ({"type": "object", "additionalProperties": REF}, "object of Answer"),
        ({"type": "object", "additionalProperties": True}, "object"),
        ({"anyOf": [{"type": "null"}, REF]}, "null or Answer"),
        ({}, "anything"),
    ],
)
def test_a_type_is_a_few_words(schema: dict[str, Any], words: str) -> None:
    html = reference_page(document(schema))
    assert f"application/json {words} Responses 200 Answer Fine" in text(html)


def test_fields_say_whether_they_are_needed_and_their_default() -> None:
    fields = {
        "a": {"type": "string", "description": "The <first>"},
        "b": {"type": "boolean", "default": False},
        "c": {"type": "string", "default": None},
    }
    html = reference_page(document({"properties": fields, "required": ["a"]}))
    assert "a string The &lt;first&gt; b? boolean (default false) c? string Responses" in text(html)


def test_what_needs_a_token_says_so() -> None:
    assert ">token<" not in reference_page(document({}))
    assert ">token<" in reference_page(document({}, security=[{"HTTPBearer": []}]))


def test_the_page_is_escaped_and_its_links_lead_somewhere() -> None:
    html = reference_page(document({"properties": {"<b>": REF}}, summary="<script>"))
    page = Checker(html)
    assert html.startswith("<!doctype html>")
    assert "script" not in page.tags
    assert "&lt;script&gt;" in html
    assert "A &lt;service&gt; 1" in html
    assert page.ids == ["Answer"]  # the framework's own schemas are left out
    assert set(re.findall('href="#([^"]*)"', html)) == {"Answer"}
    assert set(page.fetched) == {"page.css", "service.css", "openapi.json", "./"}
