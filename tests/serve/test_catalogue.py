"""Tasks are attached and removed while the service runs, and nothing else changes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.support.serving import (
    AUTH,
    Opened,
    World,
    ask,
    other_version,
    picture,
    put,
    task_names,
)
from tests.support.waiting import wait_until

from engram.errors import EngramError
from engram.store.bundles import read_bundle
from engram.store.compose import LOCK, compose, update_bundle
from engram.store.format import read_engram
from engram.store.remote import MANIFEST


def test_a_request_is_answered_by_the_tasks_it_began_with(client: TestClient, world: World) -> None:
    put(client, world, "third")
    catalogue = client.app.state.catalogue  # type: ignore[attr-defined]
    old = catalogue.now
    client.delete("/v1/tasks/third", headers=AUTH)
    assert "third" in old.names
    assert "third" not in catalogue.now.names


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
    assert task_names(client) == ["first", "second"]


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


# A folder that was damaged or moved


def damage(bundle: Path, how: str) -> None:
    """Do something to the folder of a bundle while it is served."""
    if how == "moved":
        bundle.rename(bundle.with_name("moved away"))
    elif how == "lock":
        (bundle / LOCK).unlink(missing_ok=True)
        (bundle / LOCK).mkdir()
    elif how == "text":
        (bundle / MANIFEST).write_bytes(b"{")
    else:
        (bundle / MANIFEST).unlink()
        os.mkfifo(bundle / MANIFEST)


@pytest.mark.parametrize("how", ["moved", "lock", "text", "pipe"])
def test_a_damaged_folder_is_said_without_its_path_and_left_as_it_is(
    opened: Opened, world: World, how: str
) -> None:
    client = opened(follow=0)
    damage(opened.bundle, how)
    for response in (
        put(client, world, "third"),
        client.delete("/v1/tasks/second", headers=AUTH),
    ):
        assert response.status_code == 503
        sentence = response.json()["error"]
        assert "bundle" in sentence
        assert str(opened.bundle.parent) not in sentence
        assert "/" not in sentence
    assert opened.bundle.exists() == (how != "moved")
    assert task_names(client) == ["first", "second"]


def test_a_pipe_in_place_of_an_engram_is_refused(opened: Opened, world: World) -> None:
    """Also one that nothing lists yet."""
    client = opened(follow=0)
    os.mkfifo(opened.bundle / "third.safetensors")
    assert put(client, world, "third").status_code == 503
    (opened.bundle / "second.safetensors").unlink()
    os.mkfifo(opened.bundle / "second.safetensors")
    with pytest.raises(EngramError, match="regular file"):
        read_bundle(opened.bundle)


# Several services on one folder


def test_what_one_service_changes_all_answer(opened: Opened, world: World) -> None:
    one, other = opened(follow=0.05), opened(follow=0.05)
    assert put(one, world, "third").status_code == 201
    wait_until(lambda: "third" in task_names(other))
    expected = world.logits(picture(1), "third")["third"].softmax(0).max()
    [answer] = ask(other, picture(1), tasks="third")
    assert answer["tasks"]["third"]["answer"][0]["probability"] == pytest.approx(float(expected))
    assert other.delete("/v1/tasks/third", headers=AUTH).status_code == 204
    wait_until(lambda: "third" not in task_names(one))


def test_attaching_to_a_bundle_that_another_service_changed_keeps_both(
    opened: Opened, world: World
) -> None:
    one, other = opened(follow=0), opened(follow=0)
    assert put(other, world, "third").status_code == 201
    assert put(one, world, "fourth").status_code == 201
    assert task_names(one) == ["first", "second", "third", "fourth"]
    assert put(one, world, "third").status_code == 200
    listed = [engram.spec.name for engram in read_bundle(opened.bundle).engrams]
    assert listed == ["first", "second", "third", "fourth"]
    assert other.delete("/v1/tasks/fourth", headers=AUTH).status_code == 204


def test_services_that_change_at_once_lose_nothing(opened: Opened, world: World) -> None:
    services = [opened(follow=0) for _ in range(3)]
    names = ["third", "fourth", "child", "multilabel", "regression", "thin"]

    def attach(i: int) -> int:
        return put(services[i % 3], world, names[i]).status_code

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(attach, range(len(names)))) == [201] * len(names)
    listed = {engram.spec.name for engram in read_bundle(opened.bundle).engrams}
    assert listed == {"first", "second", *names}


def test_a_folder_that_cannot_be_followed_changes_nothing_and_is_followed_later(
    opened: Opened, world: World, tmp_path: Path
) -> None:
    client = opened(follow=0)
    catalogue = client.app.state.catalogue  # type: ignore[attr-defined]
    manifest = opened.bundle / "bundle.json"
    good = manifest.read_bytes()
    manifest.write_bytes(b"{")
    with pytest.raises(EngramError, match="damaged"):
        catalogue.follow()
    assert not catalogue.follow()  # the same is not tried again
    shutil.rmtree(opened.bundle)
    compose([world.engrams["stranger"]], opened.bundle)
    with pytest.raises(EngramError, match="was trained on"):
        catalogue.follow()
    assert task_names(client) == ["first", "second"]
    for name in ("first", "second", "third"):
        shutil.copy(world.engrams[name], opened.bundle)
    compose([opened.bundle / f"{name}.safetensors" for name in ("first", "second", "third")],
            tmp_path / "new")  # fmt: skip
    shutil.copy(tmp_path / "new" / "bundle.json", manifest)
    assert good != manifest.read_bytes()
    assert catalogue.follow()
    assert task_names(client) == ["first", "second", "third"]


def test_a_file_that_is_not_in_the_bundle_is_left_alone(
    client: TestClient, opened: Opened, world: World
) -> None:
    somebodys = opened.bundle / "third.safetensors"
    somebodys.write_bytes(b"somebody's own")
    response = put(client, world, "third")
    assert response.status_code == 503
    assert "has another third.safetensors" in response.json()["error"]
    assert somebodys.read_bytes() == b"somebody's own"
    assert task_names(client) == ["first", "second"]
    somebodys.write_bytes(world.engrams["third"].read_bytes())  # as a crash may leave it
    assert put(client, world, "third").status_code == 201


@pytest.mark.parametrize(
    ("file", "dangling"),
    [
        ("third.safetensors", True),
        ("third.safetensors", False),
        ("second.safetensors", False),
        ("bundle.json", False),
    ],
)
def test_nothing_is_written_through_a_link(
    client: TestClient, opened: Opened, world: World, tmp_path: Path, file: str, dangling: bool
) -> None:
    link, target = opened.bundle / file, tmp_path / "elsewhere"
    if not dangling:
        target.write_bytes((link if link.exists() else world.engrams["third"]).read_bytes())
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    before = target.read_bytes() if target.exists() else None
    response = put(client, world, "third")
    assert response.status_code == 409, response.text
    assert f"{file} in the bundle's folder is a link" in response.json()["error"]
    assert link.is_symlink()
    assert (target.read_bytes() if target.exists() else None) == before
    assert task_names(client) == ["first", "second"]


def test_a_folder_that_cannot_be_written_changes_nothing(
    client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    response = put(client, world, "third")
    assert response.status_code == 503
    assert "No space left" in response.json()["error"]
    assert task_names(client) == ["first", "second"]
    assert "third" not in ask(client, picture())[0]["tasks"]


CHANGES = {
    "attach": lambda old, world: old.plus(read_engram(world.engrams["third"])),
    "remove": lambda old, world: old.minus("second"),
    "replace": lambda old, world: old.plus(other_version(world, "second")),
    "shadow": lambda old, world: old.with_shadow(other_version(world, "second")),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_kill_9_at_any_step_of_a_change_leaves_a_whole_bundle(
    bundle: Path, world: World, change: str
) -> None:
    """A process kills itself before the nth call that touches the disk, for every n."""
    old = read_bundle(bundle)
    new = CHANGES[change](old, world)
    before, after = old.manifest(), new.manifest()
    found = []
    for step in range(1, 30):
        child = os.fork()
        if child == 0:
            _kill_before(step)
            with contextlib.suppress(BaseException):
                update_bundle(old, new)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append(read_bundle(bundle).manifest())
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if found[-1] == after:
            update_bundle(new, old)
    else:
        raise AssertionError("it never came to an end")
    assert len(found) > 4
    assert before in found
    assert found[-1] == after
    assert all(manifest in (before, after) for manifest in found)


def _kill_before(step: int) -> None:
    """Make the nth call to the system that changes files the last of this process."""
    count = 0

    def dying(real):  # type: ignore[no-untyped-def]
        def call(*arguments, **settings):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **settings)

        return call

    for name in ("fsync", "replace", "open", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
