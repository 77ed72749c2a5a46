"""Whatever goes wrong is a status and one sentence."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from engram.errors import EngramError
from engram.serve.middleware import add_handlers
from engram.serve.problems import Problem

RAISED = {
    "problem": (Problem(503, "Busy\nnow.", retry=2), 503, "Busy now."),
    "unauthorised": (Problem(401, "No."), 401, "No."),
    "engram": (EngramError("It does not fit."), 422, "It does not fit."),
    "bug": (ZeroDivisionError("secret"), 500, "internal error"),
}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    add_handlers(app)

    @app.get("/{name}")
    def fail(name: str, number: int = 0) -> None:
        raise RAISED[name][0]

    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_is_a_status_and_a_sentence(client: TestClient, name: str) -> None:
    _, status, sentence = RAISED[name]
    response = client.get(f"/{name}")
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert sentence in response.json()["error"]


def test_headers_say_when_to_try_again_and_how_to_log_in(client: TestClient) -> None:
    assert client.get("/problem").headers["retry-after"] == "2"
    assert client.get("/unauthorised").headers["www-authenticate"] == "Bearer"


def test_the_frameworks_own_errors_are_sentences_too(client: TestClient) -> None:
    assert "There is nothing at /a/b" in client.get("/a/b").json()["error"]
    assert "/bug does not accept POST" in client.post("/bug").json()["error"]
    assert "The request is invalid" in client.get("/bug?number=x").json()["error"]
