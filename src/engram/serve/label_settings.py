"""Settings of the backend for Label Studio: this dataclass is the flags and their help."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from engram.errors import EngramError
from engram.util.flag_names import flag
from engram.util.settings import check, setting


@dataclass(frozen=True)
class LabelSettings:
    """Settings of the backend. What does not fit together is an EngramError."""

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
