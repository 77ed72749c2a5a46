"""Bearer tokens: one to ask, one to attach and remove tasks."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from engram.serve.log import Log
from engram.serve.middleware import client_address
from engram.serve.problems import Problem

Bearer = Annotated[
    HTTPAuthorizationCredentials | None,
    Depends(HTTPBearer(auto_error=False, description="ENGRAM_TOKEN, or ENGRAM_ASK_TOKEN to ask")),
]


class Tokens:
    """The secrets of a service; without `ask` everyone may ask, without `attach` nobody attaches.

    `to_ask` and `to_attach` are dependencies of endpoints. Whoever may attach may ask, too.
    """

    def __init__(self, attach: str | None, ask: str | None, log: Log) -> None:
        self.attaching, self._log = attach is not None, log
        self.to_ask = [Depends(self._check(ask, attach))] if ask is not None else []
        self.to_attach = [Depends(self._check(attach))]

    def _check(self, *tokens: str | None) -> Callable[..., Awaitable[None]]:
        known = [token.encode() for token in tokens if token is not None]

        async def check_token(request: Request, bearer: Bearer) -> None:
            if not known:
                raise Problem(
                    403,
                    "Attaching and removing tasks is disabled; start the service with --token or "
                    "ENGRAM_TOKEN to enable it.",
                )
            sent = bearer.credentials.encode() if bearer is not None else b""
            # compare_digest takes equally long for every wrong token, so time reveals nothing.
            if not any(hmac.compare_digest(sent, token) for token in known):
                client, path = client_address(request.scope), request.url.path
                self._log.event("refused token", client=client, method=request.method, path=path)
                raise Problem(
                    401, "The token is missing or wrong; send Authorization: Bearer TOKEN."
                )

        return check_token
