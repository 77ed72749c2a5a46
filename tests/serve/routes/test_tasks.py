"""Tasks are listed, described, attached and removed over HTTP, the last two only with the token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient
from tests.support.serving import AUTH, NARROW, Opened, World, ask, picture, put, task_names

from engram.store.bundles import read_bundle
from engram.store.engram import Engram
from engram.store.format import read_engram, serialise_engram


def test_tasks_are_listed_and_described(client: TestClient) -> None:
    response = client.get("/v1/tasks")
    listing = response.json()
    assert [task["name"] for task in listing["tasks"]] == ["first", "second"]
    assert listing["tasks"][1]["extends"] == ["first"]
    assert listing["backbone"]["classes"] == 7
    assert listing["attaching"]
    again = client.get("/v1/tasks", headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304
    detail = client.get("/v1/tasks/second").json()
    assert detail["class_names"] == [f"second <b>{i}</b>" for i in range(3)]
    assert detail["metrics"] == {"accuracy": 0.5}
    assert client.get("/v1/tasks/nobody").status_code == 404


def test_listing_tasks_hashes_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep all other requests waiting."""

    def never(self: Engram) -> str:
        raise AssertionError("hashed")

    monkeypatch.setattr(Engram, "content", property(never))
    listed = client.get("/v1/tasks").json()["tasks"]
    assert client.get("/v1/tasks/second").json()["content"] == listed[1]["content"]


def test_tasks_are_described_once_and_not_on_the_event_loop(
    client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engram with 99,000 metrics kept all other requests waiting whenever tasks were listed."""
    on_loop = []
    described = Engram.parameters.fget  # what every description asks an engram for

    def watched(self: Engram) -> int:
        try:
            asyncio.get_running_loop()
            on_loop.append(True)
        except RuntimeError:
            on_loop.append(False)
        return int(described(self))

    monkeypatch.setattr(Engram, "parameters", property(watched))
    assert put(client, world, "third").status_code == 201
    on_loop.clear()
    documents = [client.get(path) for path in ("/v1/tasks", "/v1/tasks", "/v1/tasks/first") * 2]
    assert on_loop == [False] * 4  # the list of three tasks, and the first of them
    assert documents[0].content == documents[1].content == documents[3].content
    assert documents[0].headers["content-type"] == "application/json"


def test_a_task_is_attached_survives_a_restart_and_is_removed(
    client: TestClient, opened: Opened, world: World
) -> None:
    before = ask(client, picture())[0]["tasks"]
    response = put(client, world, "third")
    assert response.status_code == 201, response.text
    assert response.json()["class_names"] == [f"third <b>{i}</b>" for i in range(4)]
    after = ask(client, picture())[0]["tasks"]
    assert after.keys() - before.keys() == {"third"}
    for name, answer in before.items():
        for one, other in zip(answer["answer"], after[name]["answer"], strict=True):
            assert one["class"] == other["class"]
            assert abs(one["probability"] - other["probability"]) < 2e-6
    assert put(client, world, "third").status_code == 200  # the same again changes nothing

    restarted = opened()
    assert task_names(restarted) == ["first", "second", "third"]
    assert ask(restarted, picture())[0]["tasks"].keys() == after.keys()

    gone = client.delete("/v1/tasks/third", headers=AUTH)
    assert (gone.status_code, gone.content) == (204, b"")
    assert ask(client, picture())[0]["tasks"] == before
    assert not (opened.bundle / "third.safetensors").exists()
    assert client.delete("/v1/tasks/third", headers=AUTH).status_code == 404
    assert len(read_bundle(opened.bundle).engrams) == 2


def test_side_and_readout_tasks_are_attached_answer_and_are_removed(
    client: TestClient, opened: Opened, world: World
) -> None:
    before = ask(client, picture())[0]["tasks"]
    for name, _, _ in NARROW:
        response = put(client, world, name)
        assert response.status_code == 201, response.text
    listed = {task["name"]: task for task in client.get("/v1/tasks").json()["tasks"]}
    given = {n: (t["regime"], t["settings"]) for n, t in listed.items()}
    assert given["thin"] == given["thin-child"] == ("side", {"cells": 2, "rank": 4})
    sees = {"layers": 3, "grid": False, "projected": 0}  # two layers and the final tokens
    assert given["layers"] == ("readout", sees)
    assert given["both"] == ("side+readout", {"cells": 2, "rank": 4, **sees})
    assert given["first"] == ("masked", {"cells": 5, "tokens": 1, "after_norm": False})
    assert listed["thin-child"]["extends"] == ["thin"]

    pictures = [picture(seed) for seed in range(3)]
    for data, image in zip(pictures, ask(client, *pictures), strict=True):
        for name, logits in world.logits(data, *(name for name, _, _ in NARROW)).items():
            given = {row["class"]: row["probability"] for row in image["tasks"][name]["answer"]}
            for label, probability in enumerate(logits.softmax(0).tolist()):
                assert given[str(label)] == pytest.approx(probability, abs=2e-6)
    assert ask(opened(), picture())[0]["tasks"].keys() == {*before, *(n for n, _, _ in NARROW)}

    assert client.delete("/v1/tasks/thin", headers=AUTH).status_code == 409  # its child reads it
    for name, _, _ in reversed(NARROW):
        assert client.delete(f"/v1/tasks/{name}", headers=AUTH).status_code == 204
    assert ask(client, picture())[0]["tasks"] == before


@pytest.mark.parametrize("token", [None, "", "wrong", "Bearer", "ä".encode().decode("latin-1")])
def test_only_with_the_token(client: TestClient, world: World, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}".encode("latin-1")}
    data = world.engrams["third"].read_bytes()
    for response in (
        client.put("/v1/tasks/third", content=data, headers=headers),
        client.delete("/v1/tasks/second", headers=headers),
    ):
        assert response.status_code == 401, response.text
        assert response.headers["www-authenticate"] == "Bearer"
    assert task_names(client) == ["first", "second"]


def test_paths_of_this_machine_stay_private(client: TestClient, world: World) -> None:
    recipe = {"data": "/home/ann/private/photos", "lr": 0.1}
    metrics = {"accuracy": 0.5, "from": "/home/ann/private/test.csv"}
    engram = replace(read_engram(world.engrams["third"]), recipe=recipe, metrics=metrics)
    put = client.put("/v1/tasks/third", content=serialise_engram(engram), headers=AUTH)
    assert put.status_code == 201
    assert put.json()["recipe"] == {"data": "photos", "lr": 0.1}
    assert put.json()["content"] == engram.content
    for path in ("/v1/tasks", "/v1/tasks/third"):
        answer = client.get(path).text
        assert "test.csv" in answer
        assert "private" not in answer


def test_without_a_token_nothing_changes(opened: Opened, world: World) -> None:
    client = opened(token=None)
    assert put(client, world, "third").status_code == 403
    assert "start the service with --token" in put(client, world, "third").json()["error"]
    assert client.delete("/v1/tasks/second", headers=AUTH).status_code == 403
    assert not client.get("/v1/tasks").json()["attaching"]


def test_an_engram_has_a_size_limit(opened: Opened, world: World) -> None:
    client = opened(max_engram=1000)
    assert put(client, world, "third").status_code == 413
