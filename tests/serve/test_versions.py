"""A task is replaced while it answers, rolled back, and tried as a shadow before it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.support.serving import AUTH, Opened, World, other_version, picture, put
from tests.support.waiting import wait_until

from engram.store.bundles import read_bundle
from engram.store.engram import Engram
from engram.store.format import read_engram, serialise_engram


def send(client: TestClient, engram: Engram, query: str = "", **headers: str) -> httpx.Response:
    path, data = f"/v1/tasks/{engram.spec.name}{query}", serialise_engram(engram)
    return client.put(path, content=data, headers={**AUTH, **headers})


def asked(client: TestClient, tasks: str, seed: int = 0) -> dict[str, Any]:
    files = {"image": ("a.png", picture(seed))}
    response = client.post("/v1/predict", files=files, data={"tasks": tasks})
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


@pytest.fixture
def attached(client: TestClient, world: World) -> TestClient:
    assert put(client, world, "third").status_code == 201
    return client


def test_a_task_is_replaced_at_once_and_rolled_back(
    attached: TestClient, opened: Opened, world: World
) -> None:
    old, new = read_engram(world.engrams["third"]), other_version(world, "third")
    before = asked(attached, "third,first,base")
    assert before["contents"] == {
        "third": old.content,
        "first": read_engram(world.engrams["first"]).content,
        "base": world.model.backbone.fingerprint,
    }
    snapshot = attached.app.state.catalogue.now  # type: ignore[attr-defined]
    response = send(attached, new)
    assert (response.status_code, response.json()["content"]) == (200, new.content)
    assert [version["content"] for version in response.json()["older"]] == [old.content]
    assert snapshot.contents["third"] == old.content  # what a request in progress uses
    after = asked(attached, "third,first,base")
    assert after["contents"] == {**before["contents"], "third": new.content}
    answers = [one["images"][0]["tasks"] for one in (before, after)]
    assert answers[0]["third"] != answers[1]["third"]
    assert answers[0]["first"] == answers[1]["first"]

    restarted = opened()
    assert asked(restarted, "third,first,base") == after
    assert read_engram(opened.bundle / "third.safetensors").content == new.content
    back = attached.post("/v1/tasks/third/rollback", headers=AUTH)
    assert (back.status_code, back.json()["content"]) == (200, old.content)
    assert [version["content"] for version in back.json()["older"]] == [new.content]
    assert asked(attached, "third,first,base") == before


def test_a_condition_protects_what_others_attached(attached: TestClient, world: World) -> None:
    new, newer = other_version(world, "third"), other_version(world, "third", -2)
    assert send(attached, new, **{"If-None-Match": "*"}).status_code == 412
    tag = attached.get("/v1/tasks/third").headers["etag"]
    assert send(attached, new, **{"If-Match": tag}).status_code == 200
    refused = send(attached, newer, **{"If-Match": tag})
    assert refused.status_code == 412
    assert new.content in refused.json()["error"]
    assert attached.get("/v1/tasks/third").json()["content"] == new.content
    fourth = read_engram(world.engrams["fourth"])
    assert send(attached, fourth, **{"If-Match": tag}).status_code == 412
    assert send(attached, fourth, **{"If-None-Match": "*"}).status_code == 201


def test_a_task_that_others_extend_is_not_replaced_alone(client: TestClient, world: World) -> None:
    for query in ("", "?shadow=1"):
        refused = send(client, other_version(world, "first"), query)
        assert refused.status_code == 409
        assert "second.safetensors extends a 'first'" in refused.json()["error"]
    assert send(client, other_version(world, "second")).status_code == 200  # it reads the same


def test_there_is_nothing_to_roll_back_or_promote(client: TestClient) -> None:
    for path, status in {
        "second/rollback": 409,
        "second/promote": 409,
        "none/promote": 404,
    }.items():
        response = client.post(f"/v1/tasks/{path}", headers=AUTH)
        assert response.status_code == status, response.text
    assert client.delete("/v1/tasks/second?shadow=1", headers=AUTH).status_code == 409
    assert client.post("/v1/tasks/second/rollback").status_code == 401


# Shadows


def shadow_metrics(client: TestClient, engram: Engram) -> dict[str, float]:
    """Sum and count of a shadow's agreement, and the number of its passes."""
    found = {}
    label = f'{{task="{engram.spec.name}",version="{engram.content[:16]}"}}'
    for line in client.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("engram_shadow_") and name.endswith(label):
            found[name.removesuffix(label).removeprefix("engram_shadow_")] = float(value)
    return found


def test_a_shadow_answers_into_metrics_and_log_until_it_is_promoted(
    opened: Opened, world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    client = opened(log="json")
    assert put(client, world, "third").status_code == 201
    old, same = read_engram(world.engrams["third"]), other_version(world, "third", 2)
    opposite = other_version(world, "third")
    before = asked(client, "third")
    for shadow, agreement in ((opposite, 0), (same, 3)):  # the second replaces the first
        response = send(client, shadow, "?shadow=1")
        assert (response.status_code, response.json()["content"]) == (200, old.content)
        assert response.json()["shadow"] == shadow.content
        for _ in range(3):
            assert asked(client, "third") == before
        asked(client, "first")  # another task has no shadow
        wait_until(lambda: shadow_metrics(client, shadow).get("agreement_count") == 3)  # noqa: B023
        found = shadow_metrics(client, shadow)
        assert (found["agreement_sum"], found["seconds_count"]) == (agreement, 3)
    assert send(client, same, "?shadow=1").json()["shadow"] == same.content  # nothing to do
    promoted = client.post("/v1/tasks/third/promote", headers=AUTH)
    assert (promoted.json()["content"], promoted.json()["shadow"]) == (same.content, None)
    assert asked(client, "third")["contents"] == {"third": same.content}
    bundle = read_bundle(opened.bundle)
    assert (bundle.older["third"][0].content, bundle.shadows) == (old.content, {})
    files = {path.name for path in (opened.bundle / "versions").iterdir()}
    assert files == {f"third-{old.content[:16]}.safetensors"}
    client.app.state.log.stop()  # type: ignore[attr-defined]
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    events = [line for line in lines if line["event"] != "request"]
    names = ["attached", *["attached shadow", *["shadow"] * 3] * 2, "promoted"]
    assert [line["event"] for line in events] == names
    assert events[2].items() >= {"task": "third", "images": 1, "agreement": 0.0}.items()
    assert events[2]["version"] == opposite.content[:16]


def test_a_shadow_survives_a_restart_and_is_dropped(
    attached: TestClient, opened: Opened, world: World
) -> None:
    shadow = other_version(world, "third")
    assert send(attached, shadow, "?shadow=1").status_code == 200
    restarted = opened(follow=0.05)
    assert restarted.get("/v1/tasks/third").json()["shadow"] == shadow.content
    assert attached.delete("/v1/tasks/third?shadow=1", headers=AUTH).status_code == 204
    wait_until(lambda: restarted.get("/v1/tasks/third").json()["shadow"] is None)
    assert not list((opened.bundle / "versions").iterdir())


def test_a_shadow_that_cannot_be_compared_is_refused(attached: TestClient, world: World) -> None:
    third = read_engram(world.engrams["third"])
    number = read_engram(world.engrams["regression"]).renamed("third")
    for shadow, status in ((third, 409), (number, 409), (other_version(world, "fourth"), 404)):
        assert send(attached, shadow, "?shadow=1").status_code == status
    assert attached.get("/v1/tasks/third").json()["shadow"] is None
    assert send(attached, other_version(world, "third"), "?shadow=1").status_code == 200
    assert send(attached, number).status_code == 409  # its shadow could not be compared with it


def test_a_shadow_that_fails_answers_nobody(
    attached: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = other_version(world, "third")
    assert send(attached, shadow, "?shadow=1").status_code == 200
    own = attached.app.state.catalogue.now.shadows["third"]  # type: ignore[attr-defined]

    def fails(*given: object) -> None:
        raise RuntimeError("no memory")

    before = asked(attached, "third")
    monkeypatch.setattr(own.engine, "run", fails)
    for _ in range(3):
        assert asked(attached, "third") == before
    monkeypatch.undo()
    asked(attached, "third")
    wait_until(lambda: shadow_metrics(attached, shadow).get("agreement_count", 0) >= 1)


def test_nothing_is_written_through_a_link_to_versions(
    attached: TestClient, opened: Opened, world: World, tmp_path: Path
) -> None:
    (opened.bundle / "versions").symlink_to(tmp_path)
    before = sorted(tmp_path.iterdir())
    for query in ("", "?shadow=1"):
        refused = send(attached, other_version(world, "third"), query)
        assert refused.status_code == 409
        assert "versions in the bundle's folder is a link" in refused.json()["error"]
    assert sorted(tmp_path.iterdir()) == before
