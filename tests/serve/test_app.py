"""The parts of the service fit together: its engine runs while it is open, and only then."""

from __future__ import annotations

from fastapi.testclient import TestClient
from tests.support.serving import World

from engram.serve.app import create_app
from engram.serve.catalogue import Catalogue
from engram.serve.service_settings import Settings


def test_the_engine_runs_while_the_service_is_open(world: World) -> None:
    settings = Settings()
    app = create_app(Catalogue.load(world.bundle, settings))
    assert not app.state.batcher.running
    with TestClient(app, "http://localhost") as client:
        assert app.state.batcher.running
        assert client.get("/readyz").status_code == 200
    assert not app.state.batcher.running


def test_the_document_names_the_limits_of_this_service(world: World) -> None:
    settings = Settings(max_images=3)
    app = create_app(Catalogue.load(world.bundle, settings))
    body = app.openapi()["paths"]["/v1/predict"]["post"]["requestBody"]["content"]
    form, document = (kind["schema"]["properties"] for kind in body.values())
    assert form["image"]["maxItems"] == document["images"]["maxItems"] == 3
