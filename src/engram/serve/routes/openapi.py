"""What the OpenAPI document says about errors and request bodies."""

from __future__ import annotations

from typing import Any

from engram.serve.routes.schemas import Error

_REASONS = {
    400: "The request or its body cannot be read",
    401: "The token is missing or wrong",
    403: "Attaching is disabled: the service was started without a token",
    404: "There is no such task",
    408: "The body arrived too slowly",
    409: "The engram does not fit, or the task cannot be removed",
    413: "The body is too large",
    415: "The content type is not supported",
    421: "The Host header names none of the names of this service",
    422: "An image, an engram or an option is invalid, or the answer would be too large",
    429: "This client has too many requests in progress; Retry-After says when to try again",
    503: "The service is busy; Retry-After says when to try again",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of an operation, for the argument `responses` of a route."""
    return {status: {"model": Error, "description": _REASONS[status]} for status in statuses}


def answer_limit(most: int) -> str:
    """What an operation says about the size of its answers, for `description` of a route."""
    return (
        f"An answer has {most:,} values at most, counted before it is computed: the classes or "
        "numbers of each task, the pixels of a mask, the numbers of a vector, for every image. "
        "Beyond that, the status is 422."
    )


def request_body(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A required body, by content type, for the argument `openapi_extra` of a route."""
    content = {kind: {"schema": _inlined(schema)} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions in place: references would look for them elsewhere."""
    definitions = schema.get("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            found = definitions[part["$ref"].rpartition("/")[2]]
            part = {**found, **{key: value for key, value in part.items() if key != "$ref"}}
        return {key: resolve(value) for key, value in part.items() if key != "$defs"}

    resolved: dict[str, Any] = resolve(schema)
    return resolved
