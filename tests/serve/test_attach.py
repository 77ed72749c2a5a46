"""Tasks come and go while the service runs, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from engram.serve.run import Service
from engram.serve.settings import Settings
from engram.store.bundles import read_bundle
from engram.store.format import read_engram, serialise_engram

from .conftest import AUTH, TOKEN, Opened, World, picture


def names(client: TestClient) -> list[str]:
    return [task["name"] for task in client.get("/v1/tasks").json()["tasks"]]


def put(client: TestClient, world: World, name: str, **options: object):  # type: ignore[no-untyped-def]
    data = world.engrams[name].read_bytes()
    return client.put(f"/v1/tasks/{name}", content=data, headers=AUTH, **options)


def answers(client: TestClient, **options: object) -> dict:
    response = client.post("/v1/predict", files={"image": picture()}, data=options)
    assert response.status_code == 200, response.text
    return response.json()["images"][0]["tasks"]


def test_a_task_comes_and_goes_and_survives(
    client: TestClient, opened: Opened, world: World
) -> None:
    before = answers(client)
    response = put(client, world, "third")
    assert response.status_code == 201, response.text
    assert response.json()["class_names"] == [f"third <b>{i}</b>" for i in range(4)]
    after = answers(client)
    assert after.keys() - before.keys() == {"third"}
    for name, answer in before.items():
        for one, other in zip(answer["answer"], after[name]["answer"], strict=True):
            assert one["class"] == other["class"]
            assert abs(one["probability"] - other["probability"]) < 2e-6
    assert put(client, world, "third").status_code == 200  # the same again changes nothing

    restarted = opened()
    assert names(restarted) == ["first", "second", "third"]
    assert answers(restarted).keys() == after.keys()

    gone = client.delete("/v1/tasks/third", headers=AUTH)
    assert (gone.status_code, gone.content) == (204, b"")
    assert answers(client) == before
    assert not (opened.bundle / "third.safetensors").exists()
    assert client.delete("/v1/tasks/third", headers=AUTH).status_code == 404
    assert len(read_bundle(opened.bundle).engrams) == 2


def test_a_request_is_answered_by_the_tasks_it_began_with(client: TestClient, world: World) -> None:
    put(client, world, "third")
    catalogue = client.app.state.catalogue  # type: ignore[attr-defined]
    old = catalogue.now
    client.delete("/v1/tasks/third", headers=AUTH)
    assert "third" in old.names
    assert "third" not in catalogue.now.names


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
    assert names(client) == ["first", "second"]


def test_a_token_from_a_file_ends_in_a_newline(bundle: Path) -> None:
    service = Service(bundle, Settings(port=0), token=f"{TOKEN}\n")
    with service.socket, TestClient(service.app) as client:
        assert client.delete("/v1/tasks/second", headers=AUTH).status_code == 204


def test_paths_of_this_machine_are_told_nobody(client: TestClient, world: World) -> None:
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


def test_what_does_not_fit_is_refused_with_a_sentence(
    client: TestClient, opened: Opened, world: World
) -> None:
    third = world.engrams["third"].read_bytes()
    listing = sorted(path.name for path in opened.bundle.iterdir())

    def refusal(name: str, data: bytes, status: int) -> str:
        response = client.put(f"/v1/tasks/{name}", content=data, headers=AUTH)
        assert response.status_code == status, response.text
        return response.json()["error"]

    assert "called 'third', not 'other'" in refusal("other", third, 409)
    assert "was trained on" in refusal("stranger", world.engrams["stranger"].read_bytes(), 409)
    assert "not a safetensors file" in refusal("third", b"", 422)
    assert "not a safetensors file" in refusal("third", b"x" * 1000, 422)
    assert "damaged" in refusal("third", third[:-5] + b"\xff\xff\x7f\x7f!", 422)
    for wrong in ("base", "UPPER", ".hidden", "a" * 65, "%2e%2e", "a%00b"):
        assert "cannot name a task" in refusal(wrong, third, 422)
    assert "nothing at" in refusal("..%2f..%2fetc%2fpasswd", third, 404)
    assert "/work" not in refusal("third", b"", 422)
    assert sorted(path.name for path in opened.bundle.iterdir()) == listing
    assert names(client) == ["first", "second"]


def test_another_task_of_the_same_name_has_to_wait(
    client: TestClient, world: World, tmp_path: Path
) -> None:
    from engram.store.format import read_engram, write_engram

    other = write_engram(
        tmp_path / "second.safetensors", read_engram(world.engrams["third"]).renamed("second")
    )
    response = client.put("/v1/tasks/second", content=other.read_bytes(), headers=AUTH)
    assert response.status_code == 409
    assert "delete it first" in response.json()["error"]


def test_parents_stay_while_they_have_children(client: TestClient, world: World) -> None:
    response = client.delete("/v1/tasks/first", headers=AUTH)
    assert response.status_code == 409
    assert "'first' is extended by second" in response.json()["error"]
    assert put(client, world, "child").status_code == 201
    assert client.delete("/v1/tasks/second", headers=AUTH).status_code == 204
    assert client.delete("/v1/tasks/child", headers=AUTH).status_code == 204
    response = client.delete("/v1/tasks/first", headers=AUTH)
    assert response.status_code == 409
    assert "the only task" in response.json()["error"]


def test_a_bundle_that_somebody_else_changed_is_left_alone(
    client: TestClient, opened: Opened, world: World
) -> None:
    other = opened()
    assert put(other, world, "third").status_code == 201
    response = put(client, world, "fourth")
    assert response.status_code == 503
    assert "changed by somebody else" in response.json()["error"]
    assert [e.spec.name for e in read_bundle(opened.bundle).engrams] == ["first", "second", "third"]


def test_a_file_that_is_not_in_the_bundle_is_left_alone(
    client: TestClient, opened: Opened, world: World
) -> None:
    somebodys = opened.bundle / "third.safetensors"
    somebodys.write_bytes(b"somebody's own")
    response = put(client, world, "third")
    assert response.status_code == 503
    assert "Another third.safetensors lies in" in response.json()["error"]
    assert somebodys.read_bytes() == b"somebody's own"
    assert names(client) == ["first", "second"]
    somebodys.write_bytes(world.engrams["third"].read_bytes())  # as a crash may leave it
    assert put(client, world, "third").status_code == 201


def test_a_folder_that_cannot_be_written_changes_nothing(
    client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    response = put(client, world, "third")
    assert response.status_code == 503
    assert "No space left" in response.json()["error"]
    assert names(client) == ["first", "second"]
    assert "third" not in answers(client)


def test_an_engram_has_a_size_limit(opened: Opened, world: World) -> None:
    client = opened(max_engram=1000)
    assert put(client, world, "third").status_code == 413
