"""What the service answers when it does not answer: a status and a sentence."""

from __future__ import annotations


class Problem(Exception):
    """Ends a request with this status; `retry` is after how many seconds to try again."""

    def __init__(self, status: int, sentence: str, *, retry: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry = status, sentence, retry

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})
