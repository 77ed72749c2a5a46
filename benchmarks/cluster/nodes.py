"""A Ray cluster of a head and two nodes on this machine, at the loopback address alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from engram.cluster.connect import LOOPBACK

_STORE = 256 << 20  # bytes of shared memory of each node


@contextmanager
def three_nodes(cpus: int = 1) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster`; every node has so many CPUs, however many the machine has."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", **LOOPBACK}  # before Ray is imported
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cpus, "object_store_memory": _STORE}
    cluster: Any = Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False}
    )
    try:
        for _ in range(2):
            cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


def processes(node: Any, title: str) -> list[psutil.Process]:
    """The workers of a node whose title has this text in it, such as the name of an actor."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [one for one in raylet.children() if title in " ".join(one.cmdline())]
