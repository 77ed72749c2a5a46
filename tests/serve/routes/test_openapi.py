"""What operations say about their errors and bodies in the OpenAPI document."""

import pytest

from engram.serve.schemas import Error, error_responses, request_body


def test_an_error_is_described_by_its_status() -> None:
    responses = error_responses(401, 413)
    assert list(responses) == [401, 413]
    assert responses[413] == {"model": Error, "description": "The body is too large"}
    with pytest.raises(KeyError):
        error_responses(418)


def test_a_body_is_required_and_has_a_schema_for_each_content_type() -> None:
    schemas = {"image/png": {"type": "string", "format": "binary"}, "text/plain": {}}
    body = request_body(schemas)["requestBody"]
    assert body["required"] is True
    assert {kind: entry["schema"] for kind, entry in body["content"].items()} == schemas
