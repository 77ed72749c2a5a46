"""How bulk prediction is divided among the nodes of a cluster: flags that need `--on`."""

from __future__ import annotations

from dataclasses import dataclass

from engram.util.settings import check, setting


@dataclass(frozen=True)
class ClusterSettings:
    """How many processes hold the model, what each may use, and when work is begun anew."""

    actors: int = setting(0, "processes that hold the model; 0: as many as the cluster can hold")
    gpus_per_actor: float = setting(0.0, "GPUs of each of them, or a share of one such as 0.5")
    memory_per_actor: float = setting(
        0.0, "GB of memory after which one of them is started anew; 0: no limit", metavar="GB"
    )
    timeout: float = setting(
        300.0, "seconds without any answer after which the work is begun anew", least=1
    )
    retries: int = setting(3, "times to begin anew, one after the other, before giving up")

    def __post_init__(self) -> None:
        check(self)
