"""`engram serve`: open the port, load the bundle, answer until a signal comes."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engram.errors import EngramError
from engram.serve.hosts import THIS_MACHINE, is_loopback
from engram.serve.service_settings import Settings
from engram.store.bundles import compose, is_bundle, unlisted_files
from engram.util import hub
from engram.util.description import Description
from engram.util.flag_names import flag
from engram.util.optional import require

if TYPE_CHECKING:
    from fastapi import FastAPI

    from engram.serve.catalogue import Catalogue
    from engram.serve.workers import Job

_PACKAGES = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")


@contextmanager
def bundle_of(sources: Sequence[Path]) -> Iterator[Path]:
    """The bundle to serve; engrams are composed in a folder that is gone afterwards."""
    if len(sources) == 1 and not sources[0].is_file():
        yield sources[0]
        return
    for source in sources:
        _refuse_hub(source)
    with tempfile.TemporaryDirectory(prefix="engram-") as scratch:
        yield compose(sources, Path(scratch) / "bundle").folder


def serve(
    folder: Path,
    settings: Settings,
    show: Callable[[Description], None],
    *,
    token: str | None = None,
    ask_token: str | None = None,
    backbone: str | None = None,
) -> None:
    """Serve a bundle in one process or several, until a signal comes.

    `show` is called with the description of the service as soon as it can answer.
    """
    if settings.workers == 1:
        service = Service.open(
            folder, settings, token=token, ask_token=ask_token, backbone=backbone
        )
        show(service.description)
        service.run()
        return
    from engram.serve.log import Log
    from engram.serve.workers import Job, Workers

    log = Log(settings.log)
    with open_port(folder, settings, token, ask_token) as listener:
        job = Job(listener, folder, settings, token, ask_token, backbone)
        workers = Workers(job, log.event)
        with workers.started() as description:
            show(description)
            workers.run()
    log.stop()


@dataclass(frozen=True)
class Service:
    """A loaded bundle and an open port; `run` answers until a signal comes."""

    app: FastAPI
    catalogue: Catalogue
    settings: Settings
    listener: socket.socket
    token: str | None = field(repr=False)
    ask_token: str | None = field(repr=False)

    @classmethod
    def open(
        cls,
        folder: Path,
        settings: Settings,
        *,
        token: str | None = None,
        ask_token: str | None = None,
        backbone: str | None = None,
    ) -> Service:
        """Open the port and load the bundle; whatever is wrong is an EngramError."""
        from engram.serve.workers import Job

        listener = open_port(folder, settings, token, ask_token)
        try:
            return cls.on(Job(listener, folder, settings, token, ask_token, backbone))
        except BaseException:
            listener.close()
            raise

    @classmethod
    def on(cls, job: Job) -> Service:
        """Load the bundle of a job, to answer on its port, which `open_port` opened."""
        from engram.serve.app import create_app
        from engram.serve.catalogue import Catalogue
        from engram.serve.decoding.launcher import launcher
        from engram.serve.tokens import clean_token

        token = clean_token(job.token)
        ask_token = clean_token(job.ask_token, "token for asking")
        launcher().start()  # it loads what decoders need while this process loads the model
        catalogue = Catalogue.load(job.folder, job.settings, job.backbone)
        app = create_app(catalogue, job.settings, token, ask_token)
        return cls(app, catalogue, job.settings, job.listener, token, ask_token)

    @property
    def url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def description(self) -> Description:
        """What is served and where, for the person who started it."""
        from engram.serve.admission import connections_allowed

        snapshot = self.catalogue.now
        connections = connections_allowed(self.settings)
        unlisted = unlisted_files(snapshot.bundle)
        document = {
            "url": self.url,
            "bundle": str(snapshot.bundle.folder),
            "tasks": list(snapshot.names),
            "engine": self.settings.engine,
            "device": str(snapshot.model.backbone.device),
            "workers": self.settings.workers,
            "connections": connections,
            "attaching": self.token is not None,
            "asking": "token" if self.ask_token else "open",
            "unlisted": unlisted,
        }
        attaching = "enabled" if self.token else "disabled (--token or ENGRAM_TOKEN enables it)"
        rows = [
            ("page", f"{self.url}/"),
            ("reference", f"{self.url}/docs"),
            ("tasks", ", ".join(snapshot.names)),
            ("backbone", snapshot.model.backbone.source),
            ("engine", self.settings.engine),
            ("device", str(snapshot.model.backbone.device)),
            ("workers", str(self.settings.workers)),
            ("attaching", attaching),
        ]
        if connections < self.settings.connections:
            rows.append(("connections", f"{connections}, because of the limit of open files"))
        if unlisted:
            rows.append(("not listed", f"{', '.join(unlisted)}: in the folder, not in the bundle"))
        if self.ask_token:
            rows.append(("asking", "needs the token of ENGRAM_ASK_TOKEN"))
        elif not is_loopback(self.settings.host):
            rows.append(("open", "anyone who can reach this address can send requests"))
        rows.append(("stop", "Ctrl-C; requests in progress are finished first"))
        return Description(document, rows)

    def run(self) -> None:
        """Answer until SIGTERM or Ctrl-C, then finish the requests in progress."""
        import uvicorn

        from engram.serve.admission import Admission, Server, connections_allowed, limited
        from engram.serve.connections import ServiceProtocol
        from engram.serve.log import hold_back_errors
        from engram.serve.middleware import MAX_HEADER_BYTES

        # uvicorn raises the signal again when it has finished; after SIGTERM nothing is left to do.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        settings, log = self.settings, self.app.state.log
        admission = Admission(
            connections_allowed(settings),
            settings.client_connections,
            settings.trust_proxy,
            lambda address, status: log.event_seldom(
                "refused connection", client=address, status=status
            ),
        )
        config = uvicorn.Config(
            self.app,
            http=limited(ServiceProtocol, admission),
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            forwarded_allow_ips=[*THIS_MACHINE, *settings.trust_proxy],
            timeout_keep_alive=max(1, int(min(10, settings.timeout))),
            timeout_graceful_shutdown=int(settings.timeout) + 10,
            h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
        )
        hold_back_errors()
        Server(config).run(sockets=[self.listener])


def open_port(
    folder: Path, settings: Settings, token: str | None, ask_token: str | None
) -> socket.socket:
    """Check all that needs no model, and listen: a port in use shows before a model is loaded."""
    for package in _PACKAGES:
        require(package, extra="serve", purpose="The service")
    from engram.serve.admission import connections_allowed
    from engram.serve.tokens import clean_token

    _check_bundle(folder)
    connections_allowed(settings)
    _check_access(settings, clean_token(token), clean_token(ask_token, "token for asking"))
    return _listen(settings)


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


def _listen(settings: Settings) -> socket.socket:
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        address = (settings.host, settings.port)
        listener = socket.create_server(address, family=family, backlog=512)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise EngramError(
            f"The service cannot listen on {settings.host}, port {settings.port} ({reason}); "
            "choose others with --host and --port."
        ) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # its connections have it, too
        # One whose client does not read its answer would stay open for as long as it likes.
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * settings.timeout)
        )
    return listener
