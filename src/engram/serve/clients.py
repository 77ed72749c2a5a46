"""What one client may take of what all share: requests at a time, places in the queue, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from engram.serve.problems import Problem


class Shares:
    """How much of something each client has now; more than `most` is a Problem with status 429.

    Args:
        most: What one client may have.
        what: What is counted, for the sentence.
    """

    def __init__(self, most: int, what: str) -> None:
        self.most, self.what = most, what
        self._taken: Counter[str] = Counter()

    def take(self, client: str, count: int = 1) -> None:
        if self._taken[client] + count > self.most:
            self._drop_zero(client)
            raise Problem(
                429,
                f"This client would have more than {self.most:,} {self.what}, which is the limit "
                "for one; try again in a second.",
                retry=1,
            )
        self._taken[client] += count

    def give_back(self, client: str, count: int = 1) -> None:
        self._taken[client] -= count
        self._drop_zero(client)

    @contextmanager
    def taken(self, client: str, count: int = 1) -> Iterator[None]:
        """Take for as long as a block runs."""
        self.take(client, count)
        try:
            yield
        finally:
            self.give_back(client, count)

    def _drop_zero(self, client: str) -> None:
        if not self._taken[client]:
            del self._taken[client]  # addresses would add up
