"""Bearer tokens: one to ask, one to attach and remove tasks."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from engram.serve.problems import Problem

Bearer = Annotated[
    HTTPAuthorizationCredentials | None,
    Depends(HTTPBearer(auto_error=False, description="ENGRAM_TOKEN, or ENGRAM_ASK_TOKEN to ask")),
]


@dataclass(frozen=True)
class Tokens:
    """The secrets of a service; without `ask` everyone may ask, without `attach` nobody attaches.

    `on_refused` is called with every request whose token is missing or wrong.
    """

    attach: str | None = None
    ask: str | None = None
    on_refused: Callable[[Request], None] = lambda request: None

    @property
    def to_ask(self) -> list[Any]:
        """Dependencies of an endpoint for those who may ask; the other token may do that, too."""
        tokens = [token for token in (self.ask, self.attach) if token is not None]
        return [Depends(self._check(tokens))] if self.ask is not None else []

    @property
    def to_attach(self) -> list[Any]:
        """Dependencies of an endpoint for those who may attach and remove tasks."""
        return [Depends(self._check([] if self.attach is None else [self.attach]))]

    def _check(self, tokens: list[str]) -> Callable[..., None]:
        def check_token(request: Request, bearer: Bearer) -> None:
            if not tokens:
                raise Problem(
                    403,
                    "Attaching and removing tasks is disabled; start the service with --token or "
                    "ENGRAM_TOKEN to enable it.",
                )
            sent = bearer.credentials if bearer is not None else ""
            # compare_digest takes equally long for every wrong token, so time reveals nothing.
            if not any(hmac.compare_digest(sent.encode(), one.encode()) for one in tokens):
                self.on_refused(request)
                raise Problem(
                    401, "The token is missing or wrong; send Authorization: Bearer TOKEN."
                )

        return check_token
