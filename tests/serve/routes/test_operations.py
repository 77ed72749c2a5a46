"""Liveness, readiness and metrics."""

from __future__ import annotations

from fastapi.testclient import TestClient
from tests.support.serving import ask, picture


def test_health_readiness_and_metrics(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    ask(client, picture(), picture(1), tasks="first")
    client.get("/no/such/path")
    text = client.get("/metrics").text
    assert 'engram_requests_total{method="POST",path="/v1/predict",status="200"} 1.0' in text
    assert 'engram_requests_total{method="GET",path="other",status="404"} 1.0' in text
    assert 'engram_answers_total{task="first"} 2.0' in text
    assert "engram_waiting_images 0.0" in text
    assert "engram_tasks 2.0" in text
