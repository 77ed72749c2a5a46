"""Asking needs a token where there is one, attaching always does."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from tests.support.serving import AUTH, Opened, picture

from engram import EngramError
from engram.serve.launch import clean_token

ASK = {"Authorization": "Bearer may-ask"}


@pytest.fixture
def closed(opened: Opened) -> TestClient:
    return opened(ask_token="may-ask")


def test_asking_needs_the_token(closed: TestClient) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic may-ask"}):
        for path in ("/v1/tasks", "/v1/tasks/first", "/metrics"):
            response = closed.get(path, headers=headers)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
        response = closed.post("/v1/predict", files={"image": picture()}, headers=headers)
        assert response.status_code == 401
    assert closed.get("/v1/tasks", headers=ASK).status_code == 200
    files = {"image": picture()}
    assert closed.post("/v1/predict", files=files, headers=ASK).status_code == 200


def test_the_token_for_attaching_may_ask_but_not_the_other_way_round(closed: TestClient) -> None:
    assert closed.get("/v1/tasks", headers=AUTH).status_code == 200
    assert closed.delete("/v1/tasks/second", headers=ASK).status_code == 401
    assert closed.delete("/v1/tasks/second", headers=AUTH).status_code == 204


def test_the_page_and_the_probes_need_none(closed: TestClient) -> None:
    for path in ("/", "/page.js", "/docs", "/openapi.json", "/healthz", "/readyz"):
        assert closed.get(path).status_code == 200


def test_the_document_says_what_needs_a_token(closed: TestClient, client: TestClient) -> None:
    def secured(client: TestClient) -> set[str]:
        paths = client.get("/openapi.json").json()["paths"]
        return {
            f"{method} {path}" for path, methods in paths.items()
            for method, operation in methods.items() if "security" in operation
        }  # fmt: skip

    always = {"put /v1/tasks/{name}", "delete /v1/tasks/{name}"}
    always |= {f"post /v1/tasks/{{name}}/{what}" for what in ("promote", "rollback")}
    assert secured(client) == always
    asking = {"post /v1/predict", "get /v1/tasks", "get /v1/tasks/{name}", "get /metrics"}
    asking |= {"post /v1/embed", "post /v1/teach"}
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        asking |= {f"get {model}", f"get {model}/ready", f"post {model}/infer"}
    assert secured(closed) == always | asking


def test_a_token_is_cleaned() -> None:
    assert clean_token(None) is None
    assert clean_token(" secret\n") == "secret"
    with pytest.raises(EngramError, match="The token for asking is blank"):
        clean_token(" ", "token for asking")
