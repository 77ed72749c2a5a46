"""`engram serve`: check what was asked for, open the port, and answer until a signal comes."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engram.errors import EngramError, flag
from engram.serve.hosts import is_loopback
from engram.serve.service_settings import Settings
from engram.store.bundles import is_bundle
from engram.store.compose import compose
from engram.util import hub
from engram.util.optional import require

_PACKAGES = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")


@contextmanager
def bundle_to_serve(sources: Sequence[Path]) -> Iterator[Path]:
    """The bundle to serve; engrams are composed in a folder that is gone afterwards."""
    if len(sources) == 1 and not sources[0].is_file():
        yield sources[0]
        return
    for source in sources:
        _refuse_hub(source)
    with tempfile.TemporaryDirectory(prefix="engram-") as scratch:
        yield compose(sources, Path(scratch) / "bundle").folder


@dataclass(frozen=True)
class Job:
    """A bundle to serve, and who may ask; every worker runs the same."""

    folder: Path
    settings: Settings
    token: str | None = field(default=None, repr=False)
    ask_token: str | None = field(default=None, repr=False)
    backbone: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", clean_token(self.token))
        object.__setattr__(self, "ask_token", clean_token(self.ask_token, "token for asking"))

    def open(self) -> socket.socket:
        """Check all that needs no model, and listen: a port in use shows before a model is loaded.

        Whatever is wrong is an EngramError.
        """
        for package in _PACKAGES:
            require(package, extra="serve", purpose="The service")
        from engram.serve.connections import connections_allowed

        _check_bundle(self.folder)
        connections_allowed(self.settings)
        _check_access(self.settings, self.token, self.ask_token)
        listener = listen(self.settings.host, self.settings.port)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # its connections have it, too
            # One whose client does not read its answer would stay open for as long as it likes.
            milliseconds = int(1000 * self.settings.timeout)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        return listener


def clean_token(token: str | None, name: str = "token") -> str | None:
    """A token as it is compared; a blank one, and one that no header can have, are refused."""
    if token is None:
        return None
    token = token.strip()  # a mounted secret ends in a newline
    if not token or not token.isascii():
        raise EngramError(f"The {name} is blank or has characters outside ASCII; choose another.")
    return token


def _refuse_hub(source: Path) -> None:
    if hub.is_hub_address(source):
        raise EngramError(
            f"{source} is on the Hub, and the service needs a folder on this machine; run "
            f"`engram pull {source} -o FOLDER`, then serve the folder."
        )


def _check_bundle(folder: Path) -> None:
    _refuse_hub(folder)
    if not is_bundle(folder):
        what = "is not a bundle" if folder.exists() else "does not exist, so it is not a bundle"
        raise EngramError(
            f"{folder} {what}; `engram compose FILE… -o FOLDER` makes one from engrams, which can "
            "also be served themselves."
        )


def _check_access(settings: Settings, token: str | None, ask_token: str | None) -> None:
    """Whoever opens the service to other machines must say who may ask."""
    if ask_token is None and not settings.open and not is_loopback(settings.host):
        raise EngramError(
            f"{flag('host')} is {settings.host}, so other machines can send requests; set a token "
            "for them in ENGRAM_ASK_TOKEN, or let everyone ask with --open."
        )
    if ask_token is not None and settings.open:
        raise EngramError(
            "There is a token for asking, and --open lets everyone ask; give one of the two."
        )
    if ask_token is not None and ask_token == token:
        raise EngramError(
            "The token for asking is also the one for attaching tasks; choose two different ones."
        )


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise EngramError(
            f"The service cannot listen on {host}, port {port} ({reason}); choose others with "
            "--host and --port."
        ) from None
