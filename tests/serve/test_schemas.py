"""Requests made from the OpenAPI document, good ones and bad ones: answers are as it says."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.support.serving import AUTH, TOKEN, picture

from engram.serve.app import create_app
from engram.serve.catalogue import Catalogue
from engram.serve.service_settings import Settings

PICTURES = [picture(seed) for seed in range(3)]
CODED = [base64.b64encode(data).decode() for data in PICTURES]
# What a schema can only call bytes are pictures here, so that good requests are answered.
schemathesis.openapi.format("byte", st.sampled_from(CODED))
schemathesis.openapi.format("binary", st.sampled_from(PICTURES))

OPERATIONS = [
    ("/v1/predict", "POST"),
    ("/v1/embed", "POST"),
    ("/v1/tasks", "GET"),
    ("/v1/tasks/{name}", "GET"),
    ("/v1/tasks/{name}", "PUT"),
    ("/v1/tasks/{name}", "DELETE"),
    ("/v1/tasks/{name}/promote", "POST"),
    ("/v1/tasks/{name}/rollback", "POST"),
    ("/v1/teach", "POST"),
    ("/v2", "GET"),
    ("/v2/health/live", "GET"),
    ("/v2/health/ready", "GET"),
    ("/v2/models/{name}", "GET"),
    ("/v2/models/{name}/ready", "GET"),
    ("/v2/models/{name}/infer", "POST"),
    ("/v2/models/{name}/versions/{version}", "GET"),
    ("/v2/models/{name}/versions/{version}/ready", "GET"),
    ("/v2/models/{name}/versions/{version}/infer", "POST"),
    ("/healthz", "GET"),
    ("/readyz", "GET"),
    ("/metrics", "GET"),
]


@pytest.fixture
def app(bundle: Path) -> FastAPI:
    """One for each operation: a service that has stopped does not start again."""
    catalogue = Catalogue.load(bundle, Settings(allow_host=("testserver",)))
    return create_app(catalogue, TOKEN)


def test_every_operation_is_tried(app: FastAPI) -> None:
    paths = app.openapi()["paths"]
    assert sorted(OPERATIONS) == sorted((p, m.upper()) for p, ms in paths.items() for m in ms)


def statuses(app: FastAPI, path: str, method: str, mode: GenerationMode) -> set[int]:
    """Try an operation in many ways, and check every answer against the document."""
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)[path][method]
    seen = set()

    @settings(max_examples=10, suppress_health_check=list(HealthCheck), deadline=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def try_it(case: schemathesis.Case) -> None:
        # No schema can tell an engram from other bytes, or how long vectors and the data of a shape
        # are, so those may be refused as well.
        free = method == "PUT" or path.endswith(("/infer", "/teach"))
        unless = [positive_data_acceptance] if free else []
        answered = case.call_and_validate(headers=AUTH, excluded_checks=unless)
        seen.add(answered.status_code)

    try_it()
    return seen


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_good_requests_are_answered_as_the_document_says(
    app: FastAPI, path: str, method: str
) -> None:
    seen = statuses(app, path, method, GenerationMode.POSITIVE)
    assert 200 in seen or "{name}" in path or path == "/v1/teach"  # names and vectors are made up


def test_bad_questions_are_refused_as_the_document_says(app: FastAPI) -> None:
    seen = statuses(app, "/v1/predict", "POST", GenerationMode.NEGATIVE)
    assert seen
    assert all(400 <= status < 500 for status in seen)
