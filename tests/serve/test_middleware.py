"""Every response has security headers, and headers that are too long are refused."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient
from tests.support.serving import Opened, Server

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


@pytest.mark.parametrize("path", ["/", "/v1/tasks", "/metrics", "/docs", "/healthz", "/nothing"])
def test_a_name_that_is_not_its_own_is_refused(client: TestClient, path: str) -> None:
    """Such as that of a page elsewhere whose name resolves to this machine."""
    response = client.get(path, headers={"Host": "rebind.example:8000"})
    assert response.status_code == 421
    assert "the name 'rebind.example:8000'" in response.json()["error"]
    assert client.get("/v1/tasks", headers={"Host": "127.0.0.1:8000"}).status_code == 200


def test_more_names_can_be_allowed(opened: Opened) -> None:
    client = opened(allow_host=("box.example",))
    assert client.get("/v1/tasks", headers={"Host": "box.example"}).status_code == 200
    assert client.get("/v1/tasks", headers={"Host": "other.example"}).status_code == 421


def test_two_lengths_of_a_body_end_the_connection(server: Server) -> None:
    address = urlsplit(server.url)
    smuggled = b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection((str(address.hostname), address.port), 60) as connection:
        connection.sendall(
            b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled
        )
        data = b""
        while piece := connection.recv(65536):
            data += piece
    assert data.startswith(b"HTTP/1.1 400 ")
    assert data.count(b"HTTP/1.1 ") == 1
    assert b"both Content-Length and Transfer-Encoding" in data
