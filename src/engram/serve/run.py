"""`engram serve`: read the bundle, take the port, answer until told to stop."""

from __future__ import annotations

import ipaddress
import signal
import socket
from pathlib import Path

from engram.errors import EngramError
from engram.serve.settings import Settings
from engram.store.bundles import is_bundle, unlisted_files
from engram.util import hub
from engram.util.description import Description


class Service:
    """A bundle that is loaded and a port that is taken; `run` answers until a signal comes."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        token: str | None = None,
        backbone: str | None = None,
    ) -> None:
        try:
            from engram.serve.app import create_app
            from engram.serve.catalogue import Catalogue
        except ImportError as error:
            raise EngramError(
                f"The service needs {error.name}, which is not installed; "
                "pip install 'engram-vit[serve]'."
            ) from None
        if hub.is_hub_address(folder):
            raise EngramError(
                f"{folder} is on the Hub, and a service keeps its tasks in a folder of its own; "
                f"`engram pull {folder} -o FOLDER`, then serve the folder."
            )
        if not is_bundle(folder):
            what = "is not a bundle" if folder.exists() else "does not exist, so it is not a bundle"
            engrams = folder if folder.is_file() else "FILE…"
            raise EngramError(
                f"{folder} {what}; `engram compose {engrams} -o FOLDER` makes one from engrams."
            )
        token = None if token is None else token.strip()  # a mounted secret ends in a newline
        if token is not None and (not token or not token.isascii()):
            raise EngramError("The token is blank or has letters beyond ASCII; choose another.")
        self.settings, self.token = settings, token
        self.socket = _listen(settings)  # first: a port in use is known before a model is loaded
        try:
            self.catalogue = Catalogue(folder, settings, backbone)
            self.app = create_app(self.catalogue, settings, token)
        except BaseException:
            self.socket.close()
            raise

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def description(self) -> Description:
        """What is served where, for those who started it."""
        snapshot = self.catalogue.now
        left_out = unlisted_files(snapshot.bundle)
        document = {
            "url": self.url,
            "bundle": str(snapshot.bundle.folder),
            "tasks": list(snapshot.names),
            "engine": self.settings.engine,
            "attaching": self.token is not None,
            "unlisted": left_out,
        }
        attaching = "with the token" if self.token else "off (--token or ENGRAM_TOKEN turns it on)"
        rows = [
            ("page", f"{self.url}/"),
            ("reference", f"{self.url}/docs"),
            ("tasks", ", ".join(snapshot.names)),
            ("trunk", snapshot.model.trunk.source),
            ("engine", self.settings.engine),
            ("attaching", attaching),
        ]
        if left_out:
            rows.append(("not listed", f"{', '.join(left_out)}: in the folder, not in the bundle"))
        if not _is_loopback(self.settings.host):
            rows.append(("open", "everybody who reaches this address can ask"))
        rows.append(("stop", "Ctrl-C; what was accepted is finished"))
        return Description(document, rows)

    def run(self) -> None:
        """Answer until SIGTERM or Ctrl-C, then finish what was accepted."""
        import uvicorn

        from engram.serve.connections import Punctual
        from engram.serve.observe import MOST_HEADERS

        # The server raises the signal again when it is done; after SIGTERM there is no more to do.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        config = uvicorn.Config(
            self.app,
            http=Punctual,
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, int(min(10, self.settings.timeout))),
            timeout_graceful_shutdown=int(self.settings.timeout) + 10,
            h11_max_incomplete_event_size=2 * MOST_HEADERS,
        )
        uvicorn.Server(config).run(sockets=[self.socket])


def _listen(settings: Settings) -> socket.socket:
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=512)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise EngramError(
            f"The service cannot listen on {settings.host}, port {settings.port} ({reason}); "
            "choose others with --host and --port."
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
