"""All settings of the service, and of the backend for Label Studio: flags and their help."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from engram.errors import EngramError, flag
from engram.serve.hosts import host_name
from engram.serve.log import LOGS
from engram.util.settings import ComputeSettings, check, setting, setting_of

# in panels of --help
_network, _engine = partial(setting, group="Network"), partial(setting, group="Engine")
_limit = partial(setting, group="Limits", least=1)


@dataclass(frozen=True)
class Settings:
    """Settings of the service. A value out of range is an EngramError that names it."""

    host: str = _network("127.0.0.1", "address to listen on; 0.0.0.0: all network interfaces")
    port: int = _network(8000, "port to listen on; 0: any free port", most=65535)
    allow_host: tuple[str, ...] = _network(
        (), "another name that clients may use for the service; can be repeated", metavar="NAME"
    )
    trust_proxy: tuple[str, ...] = _network(
        (),
        "address or network of a proxy whose X-Forwarded-For is believed; can be repeated",
        metavar="ADDRESS",
    )
    open: bool = setting(
        False, "let everyone who can reach the address send requests", group="Access"
    )
    log: str = setting("text", "form of the log on stderr", choices=LOGS, group="Output")

    workers: int = _engine(
        1, "server processes on the port, each with a copy of the model", least=1
    )
    follow: float = setting(
        1.0,
        "seconds between checks of the folder for tasks that were added or removed; 0: no checks",
        group="Model",
    )
    engine: str = setting_of(ComputeSettings, "engine", group="Engine")
    device: str = setting_of(ComputeSettings, "device", group="Engine")
    precision: str = setting_of(ComputeSettings, "precision", group="Engine")
    backbone_dtype: str = setting_of(ComputeSettings, "backbone_dtype", group="Engine")
    threads: int = _engine(0, "CPU threads of the engine; 0: its own default")
    batch: int = _engine(16, "maximum images per forward pass", least=1)
    wait_ms: float = _engine(3.0, "how long a forward pass waits for more images, in milliseconds")
    decoders: int = _engine(4, "processes that read requests and decode images", least=1)

    queue: int = _limit(256, "maximum images waiting; requests beyond it get status 503")
    decode_timeout: float = _limit(
        10.0, "maximum time to read a request or decode an image, in seconds", least=0.1
    )
    decode_memory: int = _limit(
        2_000_000_000, "maximum bytes of memory of a process that decodes images", least=1_000_000
    )
    client_requests: int = _limit(
        64, "maximum requests in progress per client address; more get status 429"
    )
    connections: int = _limit(
        1000, "maximum open connections per process; an idle one is closed for one more"
    )
    client_connections: int = _limit(
        100, "maximum open connections per address and process, except of trusted proxies"
    )
    max_images: int = _limit(32, "maximum images per request")
    max_body: int = _limit(64_000_000, "maximum bytes per request")
    max_bodies: int = _limit(256_000_000, "maximum bytes of all requests in progress")
    max_values: int = _limit(
        16_000_000, "maximum values in an answer, counted before it is computed"
    )
    max_pixels: int = _limit(50_000_000, "maximum pixels per image, checked before decoding")
    max_engram: int = _limit(256_000_000, "maximum bytes of an engram to attach")
    timeout: float = _limit(30.0, "maximum time per request, in seconds", least=0.1)

    def __post_init__(self) -> None:
        check(self)
        for name in self.allow_host:
            if not name or host_name(name) != name.strip("[]").lower():
                raise EngramError(
                    f"{flag('allow_host')} is {name!r}; it must be a name or an address, without "
                    "a port."
                )
        for address in self.trust_proxy:
            try:
                ipaddress.ip_network(address)
            except ValueError:
                raise EngramError(
                    f"{flag('trust_proxy')} is {address!r}; it must be an address such as "
                    "10.0.0.2, or a network such as 10.0.0.0/24."
                ) from None
        for part, whole, what in (
            ("max_images", "queue", "images may wait"),
            ("client_connections", "connections", "connections may be open"),
            ("max_body", "max_bodies", "bytes may be in progress"),
        ):
            most = getattr(self, whole)
            if getattr(self, part) > most:
                raise EngramError(
                    f"{flag(part)} is {getattr(self, part)}, but only {most} {what}; make "
                    f"{flag(whole)} at least as large."
                )


@dataclass(frozen=True)
class LabelSettings:
    """Settings of the backend for Label Studio. What does not fit together is an EngramError."""

    service: str = setting("http://127.0.0.1:8000", "address of `engram serve`", metavar="URL")
    label_studio: str = setting("http://127.0.0.1:8080", "address of Label Studio", metavar="URL")
    images: tuple[str, ...] = setting(
        (), "another address that images may be read from; can be repeated", metavar="URL"
    )
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(9090, "port to listen on", most=65535)

    def __post_init__(self) -> None:
        check(self)
        for name in ("service", "label_studio"):
            if urlsplit(getattr(self, name)).scheme not in ("http", "https"):
                raise EngramError(
                    f"{flag(name)} is {getattr(self, name)!r}; it must begin with http:// or "
                    "https://."
                )
