"""How bulk prediction is divided among the nodes of a cluster: flags that need `--on`."""

from __future__ import annotations

from dataclasses import dataclass

from engram.util.settings import check, setting


@dataclass(frozen=True)
class ClusterSettings:
    """How many processes hold the model, what each may use, and when work is begun anew."""

    actors: int = setting(
        0, "number of actors, each with a copy of the model; 0: as many as fit on the cluster"
    )
    gpus_per_actor: float = setting(0.0, "GPUs reserved per actor; can be a fraction, such as 0.5")
    memory_per_actor: float = setting(
        0.0, "memory in GB above which an actor is restarted; 0: no limit", metavar="GB"
    )
    timeout: float = setting(
        300.0, "seconds without any answer after which the pipeline is restarted", least=1
    )
    retries: int = setting(3, "restarts in a row without any answer before giving up")

    def __post_init__(self) -> None:
        check(self)
