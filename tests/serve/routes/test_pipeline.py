"""What all requests with images share: tokens, limits, and their turn in the queue."""

from __future__ import annotations

import pytest
from tests.support.serving import Opened, picture


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/embed"])
def test_tokens_and_limits_are_the_same(opened: Opened, path: str) -> None:
    client = opened(ask_token="ask", max_images=1)
    files = [("image", ("a.png", picture()))]
    assert client.post(path, files=files).status_code == 401
    headers = {"Authorization": "Bearer ask"}
    assert client.post(path, files=files, headers=headers).status_code == 200
    response = client.post(path, files=files * 2, headers=headers)
    assert response.status_code == 422
    assert "1 image at most" in response.json()["error"]
    response = client.post(path, content=b"", headers={**headers, "Content-Type": "text/plain"})
    assert response.status_code == 415
    assert client.app.state.batcher.pending == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/embed"])
def test_a_full_queue_is_refused_before_the_body_is_read(opened: Opened, path: str) -> None:
    client = opened()
    batcher = client.app.state.batcher  # type: ignore[attr-defined]
    half = batcher.settings.queue // 2
    with batcher.reserve(half, "a"), batcher.reserve(half, "b"):
        response = client.post(path, files={"image": picture()})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
