"""Start Ray on this machine, or join a cluster that is there.

    with connected("ray") as ray:            # or "ray://head:10001", "head:6379"
        workers = room(ray, cpus=1, spare=1)
        ray.get(ray.remote(work).remote())

What is started here is reachable from this machine alone, and ends with the block.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engram import __version__
from engram.errors import EngramError
from engram.util.optional import require

#: The value of --on that starts Ray on this machine.
HERE = "ray"
_CLIENT = "ray://"
_CONNECTION_SECONDS = 5.0
_CLIENT_SECONDS = 60.0
_HEAD_SECONDS = 20.0  # for what listens at the address to say that it is Ray
_WORKER_SECONDS = 120.0  # for the first worker of a cluster, which may have to be started
_STORE = 1 << 30  # bytes of shared memory that Ray takes on this machine, if it is started here
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: No statistics to the makers of Ray, no advice about its settings, no minute of retries.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "15",
}


@contextmanager
def connected(on: str, *, cpus: int | None = None) -> Iterator[Any]:
    """Connect to Ray while the block runs; gives the module `ray`.

    Args:
        on: `ray` starts Ray on this machine and ends it after the block. `HOST:PORT` joins the
            cluster with that head, from one of its machines; `ray://HOST:PORT` joins from any
            other. In a job of Ray (where RAY_ADDRESS is set), `ray` is the cluster of the job; in
            a process that is connected already, it is that connection, which stays open.
        cpus: CPUs that Ray hands out to workers, if it is started here; by default those of this
            machine, and at least two.

    Raises:
        EngramError: Ray is not installed, nothing answers at the address, what answers is no Ray
            or another version of it, or the cluster has another version of this package.
    """
    address = address_of(on)
    os.environ.update(_QUIET)  # before Ray is imported
    if address.startswith(_CLIENT) and _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    ray = require("ray", extra="cluster", purpose=f"--on {on}")
    if on == HERE and ray.is_initialized():
        yield ray
        return
    _keep_stdout(ray)
    if _only_here(address):
        use_loopback()
    with _own_signals():
        if address:
            _join(ray, address)
        else:
            cpus = cpus or max(2, os.cpu_count() or 2)
            ray.init("local", num_cpus=cpus, object_store_memory=_STORE, **_quietly())
            _check_loopback(ray)
    try:
        yield ray
    finally:
        ray.shutdown()


def _has_token() -> bool:
    """Whether there is a token for clusters that ask for one; Ray's client does not look."""
    named = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def use_loopback() -> None:
    """Let what Ray starts from now on listen at 127.0.0.1 alone; it has no other setting for this.

    It is the address that Ray takes where its clusters of several machines are switched off.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for the processes that it starts
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = False


def _check_loopback(ray: Any) -> None:
    """Whoever reaches Ray can run programs, so nobody else may."""
    address = ray.get_runtime_context().gcs_address
    if address.rpartition(":")[0] not in _LOOPBACK:
        ray.shutdown()
        raise EngramError(
            f"Ray {ray.__version__} listens at {address}, where other machines can reach it; "
            "install a version that constraints.txt names, or start a cluster and give its address."
        )


def _keep_stdout(ray: Any) -> None:
    """Ray prints what happens to its tasks to stdout, which has the result alone."""
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def room(ray: Any, *, cpus: float = 1, gpus: float = 0, spare: float = 0) -> int:
    """How many workers of so many CPUs (more than 0) and GPUs the living nodes can hold.

    `spare` CPUs of the cluster are left for other work. What runs there now is not considered.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    total = sum(node.get("CPU", 0.0) for node in nodes)
    held = 0
    for node in nodes:
        shares = [node.get("CPU", 0.0) / cpus] + ([node.get("GPU", 0.0) / gpus] if gpus else [])
        held += int(min(shares) + 1e-9)
    return max(0, min(held, int((total - spare) / cpus + 1e-9)))


def address_of(on: str) -> str:
    """The address that `connected` joins, where something listens; "" if it starts Ray here.

    It answers at once. Before work that takes a while, a wrong address is refused so.
    """
    given = os.environ.get("RAY_ADDRESS", "") if on == HERE else on
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
        raise EngramError(
            f"Nothing answers at {given} ({error}); check that the cluster runs and that this "
            "machine reaches that port of its head."
        ) from None
    return given


def _only_here(address: str) -> bool:
    """Whether Ray is to be reached at the loopback address and at no other."""
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if not address or host not in _LOOPBACK:
        return not address
    try:
        socket.create_connection((_own_address(), int(port)), _CONNECTION_SECONDS).close()
    except OSError:
        return True
    return False


def _own_address() -> str:
    """The address of this machine in its network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: only the route to there is looked up
        return str(probe.getsockname()[0])


def _join(ray: Any, address: str) -> None:
    try:
        if address.startswith(_CLIENT):
            _within(_CLIENT_SECONDS, lambda: ray.init(address, **_quietly()))
        else:
            _check_head(address)
            ray.init(address, **_quietly())
        try:
            version = ray.get(ray.remote(num_cpus=0)(_version).remote(), timeout=_WORKER_SECONDS)
        except BaseException:
            ray.shutdown()
            raise
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip(" .") if lines else type(error).__name__  # of a traceback, its end
        raise EngramError(f"The cluster at {address} cannot be joined: {reason}.") from error
    if version != __version__:
        ray.shutdown()
        found = f"engram-vit {version}" if version else "no engram-vit"
        raise EngramError(
            f"The cluster at {address} has {found}, and this machine {__version__}; install the "
            "same version, with its extra cluster, on every node."
        )


def _within(seconds: float, connect: Callable[[], object]) -> None:
    """Ray's client has no limit of its own for a server that listens and does not answer."""
    failure: list[BaseException] = [TimeoutError(f"no answer within {seconds:.0f} seconds")]

    def run() -> None:
        try:
            connect()
            failure.clear()
        except BaseException as error:
            failure[:] = [error]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]


def _check_head(address: str) -> None:
    """Ask in another process: Ray waits for minutes for a head that is none, or ends the asker."""
    code = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "health-check", "--address", address]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_HEAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngramError(
            f"What answers at {address} is not the head of a Ray cluster; give the address that "
            "ray start --head printed there, or ray://HOST:PORT for its client port."
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise EngramError(f"The Ray cluster at {address} cannot be used: {lines[-1].strip()}")


def _quietly() -> dict[str, Any]:
    return {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}


def _version() -> str:
    """The version of this package on a node, or "" if there is none."""
    try:
        return str(importlib.import_module("engram").__version__)
    except ImportError:
        return ""
