"""The systemd unit: systemd accepts it, and its command is run as it is written."""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.support.nursery import Nursery
from tests.support.units import UNIT, program_and_arguments, settings_of_unit, start_unit

from engram.serve.service_settings import Settings


@pytest.fixture(scope="module")
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("there is no systemd-analyze to check the unit with: make deploy-tools")
    return found


def test_systemd_accepts_it(analyze: str, tmp_path: Path) -> None:
    """All of it but the program, which is not installed there."""
    program, _ = program_and_arguments("x", Path("b"), 1)
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(program, "/bin/true"))
    done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("Restart=on-failure", "Restart=perhaps"))
    done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True)
    assert "perhaps" in done.stderr  # it would have said so


def test_it_is_confined(analyze: str) -> None:
    command = [analyze, "security", "--offline=yes", "--threshold=20", UNIT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout  # an exposure of 2.0 at most; without any, it is 9.6
    settings = settings_of_unit()
    assert settings["NoNewPrivileges"] == ["yes"]
    assert settings["ProtectSystem"] == ["strict"]
    assert settings["User"] == ["engram"]


def test_the_command_answers_to_the_site_and_ends_at_sigterm(
    nursery: Nursery, bundle: Path
) -> None:
    service = start_unit(nursery, "engram.test", bundle, ENGRAM_ASK_TOKEN="x")
    url = f"http://127.0.0.1:{service.port}/v1/tasks"
    asking = {"Authorization": "Bearer x"}
    assert httpx.get(url, headers={**asking, "Host": "engram.test"}, timeout=60).status_code == 200
    assert httpx.get(url, headers={**asking, "Host": "other.test"}, timeout=60).status_code == 421
    assert httpx.get(url, headers={"Host": "engram.test"}, timeout=60).status_code == 401
    assert service.stop(signal.SIGTERM) == 0


def test_without_a_token_it_is_not_started() -> None:
    (check,) = settings_of_unit()["ExecStartPre"]
    shell, flag, script = re.fullmatch(r"(\S+) (-c) '(.*)'", check).groups()  # type: ignore[union-attr]
    command = [shell, flag, script.replace("$$", "$")]  # as systemd reads it
    for env, code in (({}, 0), ({"ENGRAM_ASK_TOKEN": ""}, 0), ({"ENGRAM_ASK_TOKEN": "x"}, 1)):
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert (done.returncode == 0) == bool(code)
        assert ("must be set in /etc/engram/service.env" in done.stderr) != bool(code)


def test_it_is_stopped_only_after_requests_in_progress() -> None:
    (seconds,) = settings_of_unit()["TimeoutStopSec"]
    assert int(seconds) > Settings().timeout + 10


def test_its_folders_are_those_that_systemd_makes() -> None:
    settings = settings_of_unit()
    folders = {
        f"/var/lib/{settings['StateDirectory'][0]}/",
        f"/var/cache/{settings['CacheDirectory'][0]}/",
    }
    text = " ".join(settings["Environment"] + settings["ExecStart"])
    used = re.findall(r"/var/\w+/\S*", text)
    assert used
    assert all(f"{path}/".startswith(tuple(folders)) for path in used)
