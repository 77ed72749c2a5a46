"""The image: its commands are run as they are written, and what it is made of is there."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest
from tests.support.dockerfiles import Stage, read_dockerfile
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.waiting import FUSE, wait_until

from engram.serve.service_settings import Settings

BUILD, IMAGE = read_dockerfile(ROOT / "deploy" / "Dockerfile")


@pytest.fixture(scope="module")
def env(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The image's variables, with folders and a port of this machine."""
    cache = tmp_path_factory.mktemp("cache")
    here = {name: value.replace("/cache", str(cache)) for name, value in IMAGE.env.items()}
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    port = str(free_port())
    return {**os.environ, **here, "PATH": programs, "BUNDLE": str(bundle), "PORT": port}


@pytest.fixture(scope="module")
def service(env: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    command = [*IMAGE.command("ENTRYPOINT"), *IMAGE.command("CMD")]
    own = {**env, "ENGRAM_ASK_TOKEN": "x"}
    process = subprocess.Popen(command, env=own, cwd="/", stderr=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def healthy(env: dict[str, str]) -> bool:
    return (
        subprocess.run(IMAGE.command("HEALTHCHECK"), env=env, capture_output=True).returncode == 0
    )


def answers(env: dict[str, str]) -> bool:
    """Whether the service is there: the image's own check starts a process each time."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{env['PORT']}/readyz", timeout=60).is_success
    return False


def test_the_command_answers_is_healthy_and_ends_at_sigterm(
    env: dict[str, str], service: "subprocess.Popen[bytes]"
) -> None:
    wait_until(lambda: answers(env) or service.poll() is not None)
    assert service.poll() is None
    assert healthy(env)
    url = f"http://127.0.0.1:{env['PORT']}/v1/tasks"
    assert httpx.get(url, timeout=60).status_code == 401
    tasks = httpx.get(url, headers={"Authorization": "Bearer x"}, timeout=60).json()["tasks"]
    assert [task["name"] for task in tasks] == ["colour"]
    service.send_signal(signal.SIGTERM)  # to the process that was started, as a container does
    _, log = service.communicate(timeout=FUSE)
    assert service.returncode == 0
    assert json.loads(log.splitlines()[0])["event"] == "request"  # CMD's flags were given to it
    assert not healthy(env)


def test_it_runs_as_nobody_in_particular_and_writes_to_volumes_only() -> None:
    user = IMAGE.only("USER").split(":")[0]
    (made,) = IMAGE.all("RUN")
    assert f"--uid {user} " in made
    assert int(user) >= 1000
    volumes = ["/bundle", "/cache"]
    assert IMAGE.command("VOLUME") == volumes
    assert made.endswith(" ".join(volumes))
    written = [IMAGE.env[name] for name in ("HOME", "HF_HOME", "ENGRAM_CACHE", "BUNDLE")]
    assert all(path.startswith(tuple(volumes)) for path in written)


def test_the_port_is_the_one_that_is_exposed() -> None:
    assert IMAGE.env["PORT"] == IMAGE.only("EXPOSE") == str(Settings().port)


def test_health_is_asked_for_less_time_than_is_allowed() -> None:
    options = dict(re.findall(r"--([a-z-]+)=(\d+)s?", IMAGE.only("HEALTHCHECK")))
    (asked,) = re.findall(r"timeout=(\d+)", IMAGE.command("HEALTHCHECK")[2])
    assert int(asked) < int(options["timeout"]) < int(options["interval"])


def test_both_stages_have_the_python_that_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert {BUILD.base, IMAGE.base} == {f"python:{versions[-1]}-slim"}


def test_packages_are_pinned_and_all_but_torch_have_hashes() -> None:
    installs = re.findall(r"pip install ([^&]+)", " ".join(BUILD.all("RUN")))
    assert len(installs) == 4
    for arguments in installs:
        by_hash = "--require-hashes" in arguments
        own = "--no-index" in arguments and arguments.rstrip().endswith("/dist/*.whl")
        torch = "-c constraints.txt" in arguments and arguments.split()[-1] == "torch"
        assert by_hash or own or torch
        assert "--no-deps" in arguments


@pytest.mark.parametrize("stage", [BUILD, IMAGE], ids=["build", "image"])
def test_what_is_copied_exists_and_reaches_the_builder(stage: Stage) -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    assert "*" in rules
    for source in stage.copied:
        assert (ROOT / source).exists()
        assert any(fnmatch(source, rule) for rule in allowed), source


def test_nothing_else_reaches_the_builder() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert sorted(rule[1:] for rule in rules if rule.startswith("!")) == sorted(BUILD.copied)
