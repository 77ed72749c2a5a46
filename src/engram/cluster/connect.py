"""Start Ray on this machine, or join a cluster that is there.

What is started here is reachable from this machine alone, and ends with its user.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram import __version__
from engram.errors import EngramError
from engram.util.cpus import available_cpus
from engram.util.optional import require
from engram.util.settings import check, setting

_CLIENT = "ray://"
_CONNECTION_SECONDS = 5.0
_JOIN_SECONDS = 60.0  # for a cluster to run a first task, whose worker may have to be started
_STORE = 1 << 30  # bytes of shared memory that Ray takes on this machine, if it is started here
#: No statistics to the makers of Ray, no advice about its settings, no minute of retries.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "15",
}

_PRINT_VERSION = """
import logging, ray, sys
ray.init(sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
version = ray.remote(num_cpus=0)(lambda: __import__("engram").__version__)
print(ray.get(version.remote()))
"""


@dataclass(frozen=True)
class FarmSettings:
    """Settings of a farm: flags of `engram farm`."""

    on: str = setting(
        "local",
        "where to train: local (processes of this machine), ray (starts Ray on this machine), or "
        "the address of a Ray cluster, HOST:PORT or ray://HOST:PORT",
        offers=("local", "ray"),
        metavar="WHERE",
    )
    parallel: int | None = setting(
        None,
        "number of jobs to train at the same time (default: 1; on Ray, as many as fit on the "
        "cluster)",
        least=1,
    )
    cpus_per_job: int | None = setting(
        None,
        "CPU threads per job; on Ray, also the CPUs reserved for it (default: torch's number of "
        "threads divided by --parallel; on Ray, 1)",
        least=1,
    )
    gpus_per_job: float = setting(
        0.0, "GPUs reserved per job on Ray; can be a fraction, such as 0.5"
    )
    retries: int = setting(
        2, "number of times to restart a job that crashed, from its checkpoint", group="Training"
    )
    overwrite: bool = setting(
        False, "retrain jobs whose options have changed, and replace their tasks", group="Output"
    )
    dry_run: bool = setting(
        False, "check the jobs, print which of them share a cache, and stop", group="Output"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.on == "local" and self.gpus_per_job:
            raise EngramError(
                "--gpus-per-job is for Ray, which hands out GPUs; on this machine, give jobs a "
                'line such as device = "cuda:1".'
            )


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of bulk prediction on a cluster: flags that need `--on`."""

    actors: int = setting(0, "number of actors, each with a copy of the model; 0: as many as fit")
    gpus_per_actor: float = setting(0.0, "GPUs reserved per actor; can be a fraction, such as 0.5")
    memory_per_actor: float = setting(
        0.0, "memory in GB above which an actor is restarted; 0: no limit", metavar="GB"
    )
    timeout: float = setting(300.0, "seconds without answers until actors are restarted", least=1)
    retries: int = setting(3, "restarts in a row without any answer before giving up")

    def __post_init__(self) -> None:
        check(self)


@contextmanager
def connected(on: str) -> Iterator[Any]:
    """Connect to Ray while the block runs; gives the module `ray`.

    `ray` starts Ray on this machine and ends it after the block. `HOST:PORT` joins the cluster with
    that head, from one of its machines; `ray://HOST:PORT` joins from any other. In a job of Ray
    (where RAY_ADDRESS is set), `ray` is the cluster of the job; in a process that is connected
    already, it is that connection, which stays open.
    """
    address = check_address(on)
    os.environ.update(_QUIET)  # before Ray is imported
    if address.startswith(_CLIENT) and has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    ray = require("ray", extra="cluster", purpose=f"--on {on}")
    if on == "ray" and ray.is_initialized():
        yield ray
        return
    if address:
        _check_cluster(address)
    _init(ray, address)
    try:
        yield ray
    finally:
        ray.shutdown()


def check_address(on: str) -> str:
    """The address to join, where something listens; "" to start Ray here. It answers at once."""
    given = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    if not given or given == "local":
        return ""
    host, colon, port = given.removeprefix(_CLIENT).rpartition(":")
    if not colon or not port.isdigit():
        raise EngramError(
            f"--on is {on!r}; give ray to start Ray on this machine, or the address of a cluster: "
            "HOST:PORT of its head (usually port 6379), or ray://HOST:PORT (usually 10001)."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECTION_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = f"Nothing answers at {given} ({error}); check that the cluster runs and is in reach."
        raise EngramError(why) from None
    return given


def has_token() -> bool:
    """Whether there is a token for clusters that ask for one; Ray's client does not look."""
    named = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def room(ray: Any, *, cpus: float = 1, gpus: float = 0, spare: float = 0) -> int:
    """The number of workers that the living nodes hold, of so many CPUs and GPUs each.

    `spare` CPUs are left free.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    total = sum(node.get("CPU", 0.0) for node in nodes)
    held = 0
    for node in nodes:
        shares = [node.get("CPU", 0.0) / cpus] + ([node.get("GPU", 0.0) / gpus] if gpus else [])
        held += int(min(shares) + 1e-9)
    return max(0, min(held, int((total - spare) / cpus + 1e-9)))


def use_loopback() -> None:
    """Let what Ray starts from now on listen at 127.0.0.1 alone; it has no other setting for this.

    It is the address that Ray takes where its clusters of several machines are switched off.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for the processes that it starts
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = False


def _init(ray: Any, address: str) -> None:
    """Join Ray at an address, or start it where that is "", quietly and with our own signals."""
    if hasattr(ray._private.worker, "print_to_stdstream"):  # what happens to tasks, on stdout
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    given: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not address:
        use_loopback()
        cpus = max(2, available_cpus())
        given |= {"num_cpus": cpus, "object_store_memory": _STORE, "include_dashboard": False}
    terminated = signal.getsignal(signal.SIGTERM)
    ray.init(address or "local", **given)
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, terminated)  # which Ray replaces
    listening = "" if address else ray.get_runtime_context().gcs_address
    if listening and not listening.startswith("127.0.0.1:"):
        ray.shutdown()  # whoever reaches Ray can run programs, so nobody else may
        raise EngramError(
            f"Ray {ray.__version__} listens at {listening}, where other machines can reach it; "
            "install a version that constraints.txt names, or start a cluster and give its address."
        )


def _check_cluster(address: str) -> None:
    """Join it in another process: Ray waits for minutes for a head that is none, or exits."""
    command = [sys.executable, "-c", _PRINT_VERSION, address]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_JOIN_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngramError(
            f"What answers at {address} is not the head of a Ray cluster, or runs no task; give "
            "the address that ray start --head printed, or ray://HOST:PORT for its client port."
        ) from None
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1].strip(" .")
        raise EngramError(f"The cluster at {address} cannot be joined: {reason}.")
    if (found := done.stdout.split()[-1]) != __version__:
        raise EngramError(
            f"The cluster at {address} has engram-vit {found}, and this machine {__version__}; "
            "install the same version, with its extra cluster, on every node."
        )
