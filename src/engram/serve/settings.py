"""Every setting of the service, once: this dataclass is the flags and the documentation."""

from __future__ import annotations

from dataclasses import dataclass

from engram.errors import EngramError
from engram.util.settings import check, setting

ENGINES = ("torch", "onnx", "onnx-int8")


@dataclass(frozen=True)
class Settings:
    """How the service runs. A value out of range is an EngramError that names it."""

    host: str = setting("127.0.0.1", "the address to listen on; 0.0.0.0: all of this machine's")
    port: int = setting(8000, "the port to listen on; 0: any that is free", most=65535)
    engine: str = setting("torch", "what computes the answers", choices=ENGINES)
    threads: int = setting(0, "threads of the engine; 0: as many as it likes")
    batch: int = setting(16, "images in a pass, at most", least=1)
    wait_ms: float = setting(3.0, "milliseconds to wait for more images before a pass")
    queue: int = setting(256, "images that may wait; more are told to come back later", least=1)
    max_images: int = setting(32, "images in a request", least=1)
    max_body: int = setting(64_000_000, "bytes of a request", least=1)
    max_bodies: int = setting(256_000_000, "bytes of all requests that wait for answers", least=1)
    max_pixels: int = setting(50_000_000, "pixels of an image, known from its header", least=1)
    max_engram: int = setting(256_000_000, "bytes of an engram that is attached", least=1)
    timeout: float = setting(30.0, "seconds for a request", least=0.1)

    def __post_init__(self) -> None:
        check(self)
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
