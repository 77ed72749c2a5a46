"""Limits on what clients share: requests at a time, places in the queue, bytes, values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engram.serve.problems import Problem

Reserve = Callable[[int], None]  # counts more, or raises a Problem


class Shares:
    """Counts something for each client, and for all of them; too much is a Problem.

    `most_of_one` is the limit for one client, so that there is room for others; `most` that for all
    clients together: many, each within its own limit, add up. `what` is for the sentence.
    """

    def __init__(self, most_of_one: int, what: str, most: int | None = None) -> None:
        self.most_of_one, self.what, self.most = most_of_one, what, most
        self._taken: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """The count of all clients."""
        return self._taken.total()

    def check(self, client: str = "", count: int = 1) -> None:
        """Refuse what would be too much."""
        if self.most is not None and self.total + count > self.most:
            raise Problem(
                503,
                f"All requests together would have more than {self.most:,} {self.what}, which is "
                "the limit; try again in a second.",
                retry=1,
            )
        if self._taken[client] + count > self.most_of_one:
            raise Problem(
                429,
                f"This client would have more than {self.most_of_one:,} {self.what}, which is the "
                "limit for one; try again in a second.",
                retry=1,
            )

    @contextmanager
    def taken(self, client: str, count: int = 1) -> Iterator[Reserve]:
        """Take for as long as a block runs, which may take more."""
        own = 0

        def take(more: int) -> None:
            nonlocal own
            self.check(client, more)
            self._taken[client] += more
            own += more

        try:
            take(count)
            yield take
        finally:
            self._taken[client] -= own
            if not self._taken[client]:
                del self._taken[client]  # addresses would add up
