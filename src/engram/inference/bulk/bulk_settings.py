"""Settings of bulk prediction: the flags of `engram predict --out`."""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from typing import Any

from engram.util.cpus import DECODERS
from engram.util.settings import ComputeSettings, check, setting, setting_of


@dataclass(frozen=True)
class BulkSettings:
    """Columns of the table, and how the work is divided."""

    top_k: int = setting(5, "number of classes to return per task", least=1)
    logits: bool = setting(False, "add the raw outputs of every task, in half precision")
    embed: bool = setting(False, "add the embedding of the backbone and of every task")
    image_column: str = setting("", "column of a table that has the images or their paths")
    allow_url: str = setting(
        "",
        "addresses that lists and tables may name: schemes with commas between them, such as "
        "s3,https, or hosts of your own network, such as http://10.0.0.7:9000",
        metavar="SCHEMES",
    )
    batch: int = setting(32, "images per forward pass", least=1)
    decoders: int = setting(
        max(1, DECODERS // 2),  # the model needs the other CPUs
        "processes that decode images; 0: decode in this process",
        shown="one per two CPUs, at most 4",
    )
    device: str = setting_of(ComputeSettings, "device")
    precision: str = setting_of(ComputeSettings, "precision")
    engine: str = setting_of(ComputeSettings, "engine")
    rows: int = setting(1024, "images per part; a part is written all at once", least=1)

    def __post_init__(self) -> None:
        check(self)
        if self.allow_url:
            from engram.inference.bulk.addresses import Allowed

            Allowed.parse(self.allow_url)


class PoolSettings(BulkSettings):
    """Settings for reading images, which other commands share with bulk prediction."""

    @classmethod
    def flags(cls) -> list[Field[Any]]:
        names = ("image_column", "allow_url", "batch", "decoders")
        return [item for item in fields(cls) if item.name in names]
