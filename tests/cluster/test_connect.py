"""Ray is started or joined, quietly and on this machine alone; what cannot be is a sentence."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engram import EngramError
from engram.cluster.connect import ClusterSettings, connected, room


@pytest.mark.parametrize("on", ["127.0.0.1:1", "ray://127.0.0.1:1", "no.such.host.invalid:6379"])
def test_an_address_without_a_cluster_fails_at_once(on: str) -> None:
    with pytest.raises(EngramError, match=f"No Ray cluster answers at {on}"), connected(on):
        raise AssertionError("connected")


@pytest.mark.parametrize("on", ["ray:", "spark", "head", "ray://head", "head:port"])
def test_what_is_no_address_is_a_sentence(on: str) -> None:
    with pytest.raises(EngramError, match="give ray to start Ray"), connected(on):
        raise AssertionError("connected")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngramError, match=r"pip install .*ray\[client\]"), connected("ray"):
        raise AssertionError("connected")


def test_what_is_not_ray_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.cluster.connect._SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        on = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EngramError, match="No Ray cluster answers"), connected(on):
            raise AssertionError("connected")


def nodes(*resources: dict[str, float]) -> Any:
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": one} for one in resources])


@pytest.mark.parametrize(
    ("cpus", "gpus", "expected"),
    [
        (1, 0, 7),
        (2, 0, 3),  # 1 CPU of the last node is left over
        (1, 1, 2),
        (1, 0.25, 4),  # the CPUs of that node are used up
    ],
)
def test_room_is_counted_node_by_node(cpus: int, gpus: float, expected: int) -> None:
    ray = nodes({"memory": 1.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 3.0})
    assert room(ray, cpus, gpus, "") == expected
    with pytest.raises(EngramError, match=r"5 CPUs .* give other --flags"):
        room(ray, 5, gpus, "--flags")


_JOIN = """
import sys
from engram.cluster.connect import connected, room
with connected(sys.argv[1]) as ray:
    listening = ray.get_runtime_context().gcs_address
    print(room(ray, 1, 0, ""), ray.get(ray.remote(lambda: 6 * 7).remote()), listening)
assert not ray.is_initialized()
"""


def test_a_cluster_is_joined_from_another_process_and_left_running(cluster: Any) -> None:
    joined = subprocess.run(
        [sys.executable, "-c", _JOIN, cluster.address], capture_output=True, text=True, check=False
    )
    assert joined.stderr == ""
    held, answer, address = joined.stdout.split()
    assert int(held) >= 2  # and a node more, if Ray has yet to notice that another test removed it
    assert (answer, address) == ("42", cluster.address)
    assert cluster.address.startswith("127.0.0.1:")
    with connected("ray") as ray:  # this process is connected already
        assert ray.get(ray.remote(lambda: 1).remote()) == 1
    assert ray.is_initialized()


@pytest.mark.parametrize("wrong", [{"actors": -1}, {"gpus_per_actor": -0.5}, {"timeout": 0.0}])
def test_a_number_out_of_range_is_named(wrong: dict[str, int]) -> None:
    with pytest.raises(EngramError, match=next(iter(wrong))):
        ClusterSettings(**wrong)
