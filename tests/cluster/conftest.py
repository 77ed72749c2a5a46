"""One small Ray cluster for all tests of a process that ask for it, on the loopback address."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from engram.cluster.connect import LOOPBACK

os.environ |= LOOPBACK  # before a test imports Ray


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with a head of 2 CPUs; a test may add nodes and remove them.

    This process is connected to it, so `connected("ray")` uses it.
    """
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "1000",  # a lost node is noticed sooner
        "RAY_health_check_failure_threshold": "3",
    }
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(started.address, logging_level=logging.ERROR, log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
