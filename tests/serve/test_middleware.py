"""Every response has security headers, and headers that are too long are refused."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from engram.serve.middleware import MAX_HEADER_BYTES, SECURITY_HEADERS


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/tasks/nobody", "/no/such/path"])
def test_every_response_has_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert headers.keys() >= SECURITY_HEADERS.keys()
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_a_route_may_choose_its_own_caching(client: TestClient) -> None:
    assert client.get("/healthz").headers["cache-control"] == "no-store"
    assert client.get("/page.css").headers["cache-control"] == "no-cache"


def test_headers_that_are_too_long_are_refused(client: TestClient) -> None:
    response = client.get("/healthz", headers={"X-Much": "x" * MAX_HEADER_BYTES})
    assert response.status_code == 431
    assert "more than 32,768 bytes" in response.json()["error"]
