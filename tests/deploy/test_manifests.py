"""The manifests for Kubernetes and KServe agree with the image, the flags and the endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from tests.support.dockerfiles import read_dockerfile
from tests.support.paths import ROOT

from engram.serve.app import create_app
from engram.serve.catalogue import Catalogue
from engram.serve.service_settings import Settings

IMAGE = read_dockerfile(ROOT / "deploy" / "Dockerfile")[-1]
NAMES = ("kubernetes", "kserve")


def documents(name: str) -> dict[str, Any]:
    """The documents of a manifest, by kind."""
    text = (ROOT / "deploy" / f"{name}.yaml").read_text(encoding="utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pod(name: str) -> dict[str, Any]:
    found = documents(name)
    if name == "kserve":
        return dict(found["InferenceService"]["spec"]["predictor"])
    return dict(found["Deployment"]["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    return dict(found)


def settings_of(words: list[str]) -> Settings:
    """The settings that the arguments stand for."""
    given: dict[str, Any] = {"host": "0.0.0.0", "allow_host": []}
    words = list(words)
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        if name == "open":
            given[name] = True
        elif name == "allow_host":
            given[name].append(words.pop(0))
        else:
            given[name] = words.pop(0)
    return Settings(**{**given, "allow_host": tuple(given["allow_host"])})


@pytest.mark.parametrize("name", NAMES)
def test_the_probes_are_answered_with_these_flags(name: str, bundle: Path) -> None:
    spec = container(name)
    settings = settings_of(spec["args"])
    app = create_app(Catalogue.load(bundle, settings))
    probes = [spec[key]["httpGet"] for key in spec if key.endswith("Probe")]
    assert len(probes) >= 2
    with TestClient(app, "http://10.0.0.7") as client:
        for probe in probes:
            headers = {one["name"]: one["value"] for one in probe["httpHeaders"]}
            assert client.get(probe["path"], headers=headers).status_code == 200


@pytest.mark.parametrize("name", NAMES)
def test_port_and_user_are_those_of_the_image(name: str) -> None:
    spec = container(name)
    (port,) = spec["ports"]
    assert str(port["containerPort"]) == IMAGE.env["PORT"]
    user, _ = IMAGE.only("USER").split(":")
    security = {**pod(name).get("securityContext", {}), **spec["securityContext"]}
    assert str(security["runAsUser"]) == user
    assert security["allowPrivilegeEscalation"] is False


def test_the_volumes_of_the_image_are_mounted_and_shared() -> None:
    found, spec = documents("kubernetes"), container("kubernetes")
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["volumeMounts"]}
    assert {*IMAGE.command("VOLUME"), "/tmp"} == set(mounts)
    volumes = {volume["name"]: volume for volume in pod("kubernetes")["volumes"]}
    claim = found["PersistentVolumeClaim"]
    assert volumes[mounts["/bundle"]]["persistentVolumeClaim"] == {
        "claimName": claim["metadata"]["name"]
    }
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_service_finds_the_pods_and_has_an_allowed_name() -> None:
    found, spec = documents("kubernetes"), container("kubernetes")
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    assert found["Service"]["metadata"]["name"] in settings_of(spec["args"]).allow_host


def test_pods_have_time_to_finish_their_requests() -> None:
    assert pod("kubernetes")["terminationGracePeriodSeconds"] >= Settings().timeout + 15


def test_kserve_puts_the_bundle_where_it_is_served_from() -> None:
    environment = {one["name"]: one["value"] for one in container("kserve")["env"]}
    assert environment["BUNDLE"] == "/mnt/models"  # where KServe puts what STORAGE_URI names
    claim = documents("kubernetes")["PersistentVolumeClaim"]["metadata"]["name"]
    assert environment["STORAGE_URI"] == f"pvc://{claim}"
    assert "BUNDLE" in IMAGE.env
