"""What all requests with images share: tokens, limits, and their turn in the queue."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.support.serving import Opened, picture

from engram.serve.limits import Shares
from engram.serve.problems import Problem


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
    assert client.app.state.batcher.places.total == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/embed"])
def test_a_full_queue_is_refused_before_the_body_is_read(opened: Opened, path: str) -> None:
    client = opened()
    batcher = client.app.state.batcher  # type: ignore[attr-defined]
    half = batcher.settings.queue // 2
    with batcher.reserve(half, "a"), batcher.reserve(half, "b"):
        response = client.post(path, files={"image": picture()})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("path", "fits", "too_much"),
    [
        ("/v1/predict", {"tasks": "base"}, {}),
        ("/v1/predict", {"tasks": "base"}, {"tasks": "base", "attention": "base"}),
        ("/v1/embed", {"tasks": "base"}, {}),
    ],
)
def test_an_answer_is_counted_before_it_is_computed(
    opened: Opened, path: str, fits: dict[str, str], too_much: dict[str, str]
) -> None:
    client = opened(max_values=7 if path == "/v1/predict" else 32)  # classes, and width
    files = [("image", ("a.png", picture()))]
    response = client.post(path, files=files, data=fits)
    assert response.status_code == 200, response.text
    response = client.post(path, files=files, data=too_much)
    assert response.status_code == 422
    assert "values" in response.json()["error"]
    response = client.post(path, files=files * 2, data=fits)
    assert "send fewer images" in response.json()["error"]
    pending = client.app.state.batcher.places.total  # type: ignore[attr-defined]
    assert pending == 0


def test_answers_in_progress_are_counted_together() -> None:
    shares = Shares(2, "values in answers", most=4)
    with ExitStack() as requests:
        for client in ("a", "a", "b", "b"):
            requests.enter_context(shares.taken(client))
        with pytest.raises(Problem, match="values in answers"), shares.taken("c"):
            pass
    with shares.taken("a", 0) as take, pytest.raises(Problem) as refused:
        take(3)
    assert refused.value.status == 429
    assert not shares._taken


def test_the_reference_states_the_limit_of_answers(opened: Opened) -> None:
    paths = opened(max_values=1234).get("/openapi.json").json()["paths"]
    for path in ("/v1/predict", "/v1/embed", "/v2/models/{name}/infer"):
        assert "1,234 values" in paths[path]["post"]["description"]
