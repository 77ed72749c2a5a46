"""One client cannot take what all share."""

from __future__ import annotations

import threading

import pytest
from tests.support.serving import Opened, picture

from engram.serve.limits import Shares
from engram.serve.problems import Problem


def test_a_client_has_a_share_and_others_have_theirs() -> None:
    shares = Shares(3, "requests in progress")
    with shares.taken("a", 2), shares.taken("b", 3):
        with pytest.raises(Problem) as refused, shares.taken("a", 2):
            pass
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"] == "1"
        assert "more than 3 requests in progress" in refused.value.sentence
        with shares.taken("a") as take, pytest.raises(Problem):
            take(1)
    with shares.taken("a", 3):
        pass
    assert not shares._taken  # addresses do not add up


def test_requests_of_one_client_at_a_time_have_a_limit(opened: Opened) -> None:
    client = opened(client_requests=2, wait_ms=700)  # so that they are under way for a while
    statuses: list[tuple[int, str]] = []

    def ask() -> None:
        response = client.post("/v1/predict", files={"image": picture()})
        statuses.append((response.status_code, response.headers.get("retry-after", "")))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    while not statuses:  # the refused ones are the first
        assert client.get("/healthz").status_code == 200  # which does not count
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [(200, "")] * 2 + [(429, "1")] * 3
    ask()
    assert statuses[-1] == (200, "")


def test_one_client_cannot_take_the_whole_queue(opened: Opened) -> None:
    client = opened(queue=8, max_images=4)
    batcher = client.app.state.batcher  # type: ignore[attr-defined]
    with batcher.reserve(4, "a"):
        with pytest.raises(Problem) as refused, batcher.reserve(1, "a"):
            pass
        assert refused.value.status == 429
        with batcher.reserve(4, "b"):
            assert batcher.places.total == 8
    assert batcher.places.total == 0
