"""Start Ray on this machine, or join a cluster that is there.

What is started here is reachable from this machine alone, and ends with its user.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from engram import __version__
from engram.errors import EngramError
from engram.util.cpus import available_cpus
from engram.util.optional import require
from engram.util.settings import check, setting
from engram.util.text import first_line

_CLIENT = "ray://"
_SECONDS = 5.0  # for an address to answer
_STORE = 1 << 30  # bytes of shared memory that Ray takes on this machine, if it is started here
#: No statistics to the makers of Ray, no advice about its settings, no minute of retries.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "15",
}
#: Set before Ray is imported, it lets all that Ray starts listen at 127.0.0.1 alone: the address
#: that it takes where its clusters of several machines are switched off.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


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
        None, "jobs to train at the same time (default: 1; on Ray, all that fit)", least=1
    )
    cpus_per_job: int | None = setting(
        None,
        "CPU threads per job; on Ray, also the CPUs reserved for it (default: torch's number of "
        "threads divided by --parallel; on Ray, 1)",
        least=1,
    )
    gpus_per_job: float = setting(0.0, "GPUs reserved per job on Ray; can be a fraction like 0.5")
    retries: int = setting(2, "restarts of a job that crashed, from its checkpoint")

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
    timeout: float = setting(300.0, "seconds without any answer until it gives up", least=1)

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
    os.environ.update(_QUIET if address else _QUIET | LOOPBACK)
    ray = require("ray", extra="cluster", purpose=f"--on {on}")
    if on == "ray" and ray.is_initialized():
        yield ray
        return
    if hasattr(ray._private.worker, "print_to_stdstream"):  # what happens to tasks, on stdout
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        _join(ray, address) if address else _start(ray)
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, terminated)  # which Ray replaces
        yield ray
    finally:
        ray.shutdown()


def check_address(on: str) -> str:
    """The address to join, where a cluster answers in seconds; "" to start Ray here."""
    given = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    if not given or given == "local":
        return ""
    host, colon, port = given.removeprefix(_CLIENT).rpartition(":")
    if not colon or not port.isdigit():
        raise EngramError(
            f"--on is {on!r}; give ray to start Ray on this machine, or the address of a cluster: "
            "HOST:PORT of its head (usually port 6379), or ray://HOST:PORT (usually 10001)."
        )
    grpc = require("grpc", extra="cluster", purpose=f"--on {on}")
    try:  # Ray itself would wait for minutes
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS).close()
        with grpc.insecure_channel(f"{host}:{port}") as channel:
            if not os.environ.get("RAY_USE_TLS"):
                grpc.channel_ready_future(channel).result(timeout=_SECONDS)
    except (OSError, OverflowError, grpc.FutureTimeoutError) as error:
        raise EngramError(
            f"No Ray cluster answers at {given} ({first_line(error)}); check that it runs, is in "
            "reach, and has this address: ray start --head printed it."
        ) from None
    return given


def room(ray: Any, cpus: float, gpus: float, flags: str) -> int:
    """The number of workers, of so many CPUs and GPUs each, that living nodes hold: at least 1."""
    held = 0
    for node in (node["Resources"] for node in ray.nodes() if node["Alive"]):
        shares = [node.get("CPU", 0.0) / cpus] + ([node.get("GPU", 0.0) / gpus] if gpus else [])
        held += int(min(shares) + 1e-9)
    if not held:
        raise EngramError(
            f"No node of the cluster has the {cpus} CPUs and {gpus:g} GPUs that were asked for; "
            f"give other {flags}."
        )
    return held


def _start(ray: Any) -> None:
    given = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    ray.init("local", num_cpus=max(2, available_cpus()), object_store_memory=_STORE, **given)
    listening = ray.get_runtime_context().gcs_address
    if not listening.startswith("127.0.0.1:"):  # whoever reaches Ray can run programs
        raise EngramError(
            f"Ray {ray.__version__} listens at {listening}, where other machines can reach it; "
            "install a version that constraints.txt names, or start a cluster and give its address."
        )


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        version = ray.remote(num_cpus=0)(lambda: __import__("engram").__version__)
        found = ray.get(version.remote())
    except Exception as error:  # of many kinds: another version of Ray or Python, no token
        why = first_line(getattr(error, "cause", None) or error).strip(" .")
        raise EngramError(f"The cluster at {address} cannot be joined: {why}.") from None
    if found != __version__:
        raise EngramError(
            f"The cluster at {address} has engram-vit {found}, and this machine {__version__}; "
            "install the same version, with its extra cluster, on every node."
        )
