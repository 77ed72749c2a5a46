"""Sample /healthz of a service until standard input ends, then print the slowest answer in seconds.

    python -m benchmarks.attacks.health URL

It is a process of its own, so that what is measured is the service and not the clients' threads.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from urllib.parse import urlsplit

EVERY = 0.05  # seconds between two samples


def seconds_of_answer(url: str) -> float:
    """How long one answer takes; infinite if there is none."""
    address, began = urlsplit(url), time.perf_counter()
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    try:
        connection.request("GET", "/healthz")
        answered = connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        answered = False
    finally:
        connection.close()
    return time.perf_counter() - began if answered else float("inf")


def main(url: str) -> None:
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    slowest = seconds_of_answer(url)
    while not stop.wait(EVERY):
        slowest = max(slowest, seconds_of_answer(url))
    print(slowest)


if __name__ == "__main__":
    main(sys.argv[1])
