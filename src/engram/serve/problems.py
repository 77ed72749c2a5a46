"""Errors as responses: a status and a sentence. Decoders raise them, too: no web framework here."""

from __future__ import annotations


class Problem(Exception):
    """Ends a request with this status.

    `retry` is the number of seconds before trying again; `close` ends the connection, too.
    """

    def __init__(
        self, status: int, sentence: str, *, retry: int | None = None, close: bool = False
    ) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
        self.headers = {} if retry is None else {"Retry-After": str(retry)}
        self.headers |= {"Connection": "close"} if close else {}
        self.headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
