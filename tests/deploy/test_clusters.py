"""The examples of Ray clusters are what Ray reads, and their commands are those of this package."""

from __future__ import annotations

import shlex
from typing import Any

import typer
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from tests.support.paths import ROOT

from engram.cli.main import app


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))


def version_of_ray() -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (found,) = [line for line in lines if line.startswith("ray==")]
    return found.removeprefix("ray==")


def parsed(words: list[str]) -> dict[str, Any]:
    """What `engram predict` understands of a command."""
    assert words[:2] == ["engram", "predict"]
    command = typer.main.get_command(app).commands["predict"]
    return dict(command.make_context("predict", words[2:]).params)


def test_the_cluster_of_machines_has_the_form_that_ray_up_reads() -> None:
    config = read("ray.yaml")
    validate_config(prepare_config(config))
    assert any(f"ray[data]=={version_of_ray()}" in line for line in config["setup_commands"])
    for line in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "--disable-usage-stats" in config[line][-1]


def test_the_job_for_kuberay_holds_its_actors_and_names_its_volumes() -> None:
    spec = read("kuberay.yaml")["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == version_of_ray()
    (workers,) = cluster["workerGroupSpecs"]
    given = parsed(shlex.split(spec["entrypoint"]))
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    cpus = workers["minReplicas"] * int(pods[1]["containers"][0]["resources"]["requests"]["cpu"])
    assert given["on"] == "ray"
    assert given["actors"] < cpus
    for pod in pods:
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for word in (*given["sources"], str(given["out"])):
            assert any(word.startswith(f"{path}/") for path in paths)
