"""All settings of the service: this dataclass is the flags and their help."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from engram.errors import EngramError
from engram.serve.hosts import host_name
from engram.serve.log import LOGS
from engram.util.flag_names import flag
from engram.util.settings import (
    ABOUT_BACKBONE_DTYPE,
    ABOUT_DEVICE,
    ABOUT_ENGINE,
    ABOUT_PRECISION,
    BACKBONE_DTYPES,
    ENGINES,
    PRECISIONS,
    check,
    setting,
)

# panels of --help
_MODEL, _OUTPUT, _ACCESS, _NETWORK = "Model", "Output", "Access", "Network"
_ENGINE, _LIMITS = "Engine", "Limits"


@dataclass(frozen=True)
class Settings:
    """Settings of the service. A value out of range is an EngramError that names it."""

    host: str = setting(
        "127.0.0.1", "address to listen on; 0.0.0.0: all network interfaces", group=_NETWORK
    )
    port: int = setting(8000, "port to listen on; 0: any free port", most=65535, group=_NETWORK)
    allow_host: tuple[str, ...] = setting(
        (),
        "another name that clients may use for the service; can be repeated",
        group=_NETWORK,
        metavar="NAME",
    )
    trust_proxy: tuple[str, ...] = setting(
        (),
        "address or network of a proxy whose X-Forwarded-For is believed; can be repeated",
        group=_NETWORK,
        metavar="ADDRESS",
    )
    open: bool = setting(
        False, "let everyone who can reach the address send requests", group=_ACCESS
    )
    log: str = setting("text", "form of the log on stderr", choices=LOGS, group=_OUTPUT)

    workers: int = setting(
        1, "server processes on the port, each with a copy of the model", least=1, group=_ENGINE
    )
    follow: float = setting(
        1.0,
        "seconds between checks of the folder for tasks that were added or removed; 0: no checks",
        group=_MODEL,
    )
    engine: str = setting("torch", ABOUT_ENGINE, choices=ENGINES, group=_ENGINE)
    device: str = setting("auto", ABOUT_DEVICE, group=_ENGINE)
    precision: str = setting("fp32", ABOUT_PRECISION, choices=PRECISIONS, group=_ENGINE)
    backbone_dtype: str = setting(
        "fp32", ABOUT_BACKBONE_DTYPE, choices=BACKBONE_DTYPES, group=_ENGINE
    )
    threads: int = setting(0, "CPU threads of the engine; 0: its own default", group=_ENGINE)
    batch: int = setting(16, "maximum images per forward pass", least=1, group=_ENGINE)
    wait_ms: float = setting(
        3.0, "how long a forward pass waits for more images, in milliseconds", group=_ENGINE
    )

    queue: int = setting(
        256, "maximum images waiting; requests beyond it get status 503", least=1, group=_LIMITS
    )
    decoders: int = setting(
        4, "processes that read requests and decode images", least=1, group=_ENGINE
    )
    decode_timeout: float = setting(
        10.0,
        "maximum time to read a request or decode an image, in seconds",
        least=0.1,
        group=_LIMITS,
    )
    decode_memory: int = setting(
        2_000_000_000,
        "maximum bytes of memory of a process that decodes images",
        least=1_000_000,
        group=_LIMITS,
    )
    client_requests: int = setting(
        64,
        "maximum requests in progress per client address; more get status 429",
        least=1,
        group=_LIMITS,
    )
    connections: int = setting(
        1000,
        "maximum open connections per process; an idle one is closed for one more",
        least=1,
        group=_LIMITS,
    )
    client_connections: int = setting(
        100,
        "maximum open connections per address and process, except of trusted proxies",
        least=1,
        group=_LIMITS,
    )
    max_images: int = setting(32, "maximum images per request", least=1, group=_LIMITS)
    max_body: int = setting(64_000_000, "maximum bytes per request", least=1, group=_LIMITS)
    max_bodies: int = setting(
        256_000_000, "maximum bytes of all requests in progress", least=1, group=_LIMITS
    )
    max_values: int = setting(
        16_000_000,
        "maximum values in an answer, counted before it is computed",
        least=1,
        group=_LIMITS,
    )
    max_pixels: int = setting(
        50_000_000, "maximum pixels per image, checked before decoding", least=1, group=_LIMITS
    )
    max_engram: int = setting(
        256_000_000, "maximum bytes of an engram to attach", least=1, group=_LIMITS
    )
    timeout: float = setting(30.0, "maximum time per request, in seconds", least=0.1, group=_LIMITS)

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
