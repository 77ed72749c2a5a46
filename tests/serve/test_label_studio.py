"""Label Studio gets predictions of a service, and annotated images become a folder to fit from.

The requests are those that Label Studio documents and sends; where its SDK is installed, it checks
the predictions itself.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.support.serving import Opened, World, picture

from engram.data.datasets import load
from engram.errors import EngramError
from engram.serve.label_studio import (
    LabelBackend,
    LabelSecrets,
    label_app,
    run_label_backend,
)
from engram.serve.service_settings import LabelSettings
from engram.store.format import read_engram, serialise_engram

CLASSES = ["plain", "other", "third one", "fourth"]
CONFIG = f"""<View><Image name="image" value="$photo"/><Choices name="label" toName="image">
{"".join(f'<Choice value="{name}"/>' for name in CLASSES)}</Choices></View>"""
SECRETS = LabelSecrets(ask_token="ask", api_key="key")


@pytest.fixture
def answering(opened: Opened, world: World) -> TestClient:
    """A service with a task whose classes are those of the labelling configuration."""
    client = opened(ask_token="ask")
    engram = read_engram(world.engrams["third"])
    renamed = replace(engram, spec=replace(engram.spec, name="kinds", classes=tuple(CLASSES)))
    headers = {"Authorization": "Bearer a-secret"}
    data = serialise_engram(renamed)
    assert client.put("/v1/tasks/kinds", content=data, headers=headers).status_code == 201
    return client


@pytest.fixture
def backend(answering: TestClient, tmp_path: Path) -> Callable[..., TestClient]:
    """The backend, whose requests to the service and to Label Studio are answered here."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.port == 8080:
            if request.headers.get("authorization") != "Token key":
                return httpx.Response(401)
            if not request.url.path.startswith("/data/upload/"):
                return httpx.Response(404)
            return httpx.Response(200, content=picture(int(request.url.path[-5])))
        headers = {n: v for n, v in request.headers.items() if n not in ("host", "content-length")}
        found = answering.request(
            request.method, request.url.path, content=request.read(), headers=headers
        )
        return httpx.Response(found.status_code, content=found.content)

    def make(own: LabelSecrets = SECRETS, task: str = "kinds") -> TestClient:
        client = httpx.Client(transport=httpx.MockTransport(answer))
        made = LabelBackend(LabelSettings(), task, tmp_path / "labelled", own, client)
        return TestClient(label_app(made), "http://localhost")

    return make


def task_of(number: int, photo: str | None = None) -> dict[str, Any]:
    return {"id": number, "data": {"photo": photo or f"/data/upload/1/{number}.png"}}


def event(action: str, task: int, annotation: int, *choices: str, **more: Any) -> dict[str, Any]:
    """A webhook of Label Studio."""
    result = {
        "from_name": "label",
        "to_name": "image",
        "type": "choices",
        "value": {"choices": list(choices)},
    }
    return {
        "action": action,
        "task": task_of(task),
        "annotation": {"id": annotation, "result": [result], "was_cancelled": False, **more},
        "project": {"id": 1, "label_config": CONFIG},
    }


def test_predictions_are_the_answers_of_the_service(
    backend: Callable[..., TestClient], world: World
) -> None:
    client = backend()
    assert client.get("/health").json()["status"] == "UP"
    setup = {"project": "1.17", "schema": CONFIG, "hostname": "", "access_token": ""}
    version = client.post("/setup", json=setup).json()["model_version"]
    inside = "data:image/png;base64," + base64.b64encode(picture(2)).decode()
    tasks = [task_of(1), task_of(2, inside)]
    request = {"tasks": tasks, "project": "1.17", "label_config": CONFIG, "params": {}}
    response = client.post("/predict", json=request)
    assert response.status_code == 200, response.text
    for number, found in zip((1, 2), response.json()["results"], strict=True):
        logits = world.logits(picture(number), "third")["third"].softmax(0)
        assert found["score"] == pytest.approx(float(logits.max()), abs=1e-5)
        assert found["model_version"] == version
        (result,) = found["result"]
        names = {"from_name": "label", "to_name": "image", "type": "choices"}
        assert result == {**names, "value": {"choices": [CLASSES[int(logits.argmax())]]}}
    assert client.get("/versions").json() == {"versions": [version]}


def test_label_studio_itself_takes_the_predictions(backend: Callable[..., TestClient]) -> None:
    interface = pytest.importorskip("label_studio_sdk.label_interface").LabelInterface(CONFIG)
    request = {"tasks": [task_of(1)], "label_config": CONFIG}
    (prediction,) = backend().post("/predict", json=request).json()["results"]
    assert interface.validate_prediction(prediction)
    interface.validate_prediction(prediction, return_errors=True)


def test_annotations_become_a_folder_that_is_read_as_data(
    backend: Callable[..., TestClient], tmp_path: Path
) -> None:
    client, out = backend(), tmp_path / "labelled"

    def send(*given: Any, **more: Any) -> str:
        response = client.post("/webhook", json=event(*given, **more))
        assert response.status_code == 201, response.text
        return str(response.json()["result"])

    def found() -> set[str]:
        return {path.relative_to(out).as_posix() for path in out.glob("*/*")}

    assert send("ANNOTATION_CREATED", 1, 11, "plain") == "kept"
    assert send("ANNOTATION_CREATED", 2, 12, "plain") == "kept"
    assert send("ANNOTATION_CREATED", 3, 13, "third one") == "kept"
    assert (out / "plain/1-11.png").read_bytes() == picture(1)
    assert send("ANNOTATION_UPDATED", 2, 12, "third one") == "kept"  # somebody thought again
    assert found() == {"plain/1-11.png", "third one/3-13.png", "third one/2-12.png"}
    assert set(load(out).classes) == {"plain", "third one"}
    assert send("ANNOTATION_UPDATED", 3, 13, was_cancelled=True) == "skipped"
    assert send("ANNOTATION_CREATED", 4, 14, "plain", "other") == "not one choice"
    deleted = {"action": "ANNOTATIONS_DELETED", "annotations": [{"id": 12}], "project": {"id": 1}}
    assert client.post("/webhook", json=deleted).json() == {"result": "deleted"}
    assert client.post("/webhook", json={"action": "PROJECT_UPDATED"}).json()["result"] == "ignored"
    assert found() == {"plain/1-11.png"}


def test_what_is_not_allowed_is_refused(backend: Callable[..., TestClient], tmp_path: Path) -> None:
    client = backend()
    bad = CONFIG.replace("plain", "../plain")
    elsewhere = {"tasks": [task_of(1, "http://evil.example/1.png")], "label_config": CONFIG}
    for path, body, status in (
        ("/predict", {"tasks": [task_of(1)]}, 422),
        ("/predict", {"tasks": [task_of(1)], "label_config": "<View"}, 422),
        ("/predict", {"tasks": [task_of(1)], "label_config": "<View/>"}, 422),
        ("/predict", elsewhere, 422),
        ("/predict", {"tasks": [task_of(1, "/../../etc")], "label_config": CONFIG}, 502),
        ("/webhook", event("ANNOTATION_CREATED", 1, 11, "unknown"), 422),
        (
            "/webhook",
            {
                **event("ANNOTATION_CREATED", 1, 11, "../plain"),
                "project": {"label_config": bad},
            },
            422,
        ),
    ):
        response = client.post(path, json=body)
        assert response.status_code == status, (path, response.text)
        assert response.json()["error"].endswith(".")
    assert not (tmp_path / "labelled").exists()
    assert backend(task="nobody").post("/setup", json={"schema": CONFIG}).status_code == 502
    # Pages of other sites can send no JSON, nor read answers under a name of their own.
    assert client.post("/webhook", content="{}").status_code == 415
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 421


def test_other_machines_need_a_password(backend: Callable[..., TestClient], tmp_path: Path) -> None:
    client = backend(LabelSecrets("ask", "key", password="secret"))
    assert client.get("/health").status_code == 401
    assert client.get("/health", auth=("anyone", "wrong")).status_code == 401
    assert client.get("/health", auth=("anyone", "secret")).status_code == 200
    with pytest.raises(EngramError, match="ENGRAM_LABEL_PASSWORD"):
        run_label_backend(
            LabelSettings(host="0.0.0.0"), "kinds", tmp_path, LabelSecrets(), lambda url: None
        )
