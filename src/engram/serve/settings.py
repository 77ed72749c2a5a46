"""Every setting of the service, once: this dataclass is the flags and the documentation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from engram.errors import EngramError

ENGINES = ("torch", "onnx", "onnx-int8")


def _setting(default: Any, about: str, least: float = 0, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"about": about, "least": least, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """How the service runs. A value out of range is an EngramError that names it."""

    host: str = _setting("127.0.0.1", "the address to listen on; 0.0.0.0: all of this machine's")
    port: int = _setting(8000, "the port to listen on; 0: any that is free")
    engine: str = _setting("torch", "what computes the answers", choices=ENGINES)
    threads: int = _setting(0, "threads of the engine; 0: as many as it likes")
    batch: int = _setting(16, "images in a pass, at most", 1)
    wait_ms: float = _setting(3.0, "milliseconds to wait for more images before a pass")
    queue: int = _setting(256, "images that may wait; more are told to come back later", 1)
    max_images: int = _setting(32, "images in a request", 1)
    max_body: int = _setting(64_000_000, "bytes of a request", 1)
    max_bodies: int = _setting(256_000_000, "bytes of all requests that wait for answers", 1)
    max_pixels: int = _setting(50_000_000, "pixels of an image, known from its header", 1)
    max_engram: int = _setting(256_000_000, "bytes of an engram that is attached", 1)
    timeout: float = _setting(30.0, "seconds for a request", 0.1)

    def __post_init__(self) -> None:
        for item in fields(self):
            value, about = getattr(self, item.name), item.metadata
            kind = {"int": int, "float": (int, float), "str": str}[str(item.type)]
            if isinstance(value, bool) or not isinstance(value, kind):  # type: ignore[arg-type]
                raise EngramError(f"{item.name} is {value!r}; it must be of the type {item.type}.")
            if about["choices"] and value not in about["choices"]:
                raise EngramError(
                    f"{item.name} is {value!r}; it can be {', '.join(about['choices'])}."
                )
            if not isinstance(value, str) and not about["least"] <= value < math.inf:
                raise EngramError(
                    f"{item.name} is {value!r}; it must be a number, at least {about['least']:g}."
                )
        if self.port > 65535:
            raise EngramError(f"port is {self.port}; it must be at most 65535.")
        if self.max_images > self.queue:
            raise EngramError(
                f"max_images is {self.max_images}, but only {self.queue} images may wait; make "
                "the queue at least as long."
            )
        if self.max_body > self.max_bodies:
            raise EngramError(
                f"max_body is {self.max_body}, but all requests together may have "
                f"{self.max_bodies} bytes; make max_bodies at least as large."
            )
