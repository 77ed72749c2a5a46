"""Heads that learned from features of a pass in bf16, asked about features of one in fp32.

    OMP_NUM_THREADS=1 python -m benchmarks.cache_precision [--backbone FOLDER]

On a CPU that has bf16, `fit` fills the cache with a pass in bf16 where that pass is long, and its
tasks then answer in single precision. For three datasets and three draws of ten images a class, a
linear head on the pooled token and one on all layer statistics are solved from both kinds of
features. It takes a few minutes of one core and writes benchmarks/results/cache_precision.md.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import engram
from benchmarks.paths import BACKBONE, BUILD
from benchmarks.report import markdown_table, write_report
from benchmarks.small import TITLES, drawn, load
from engram.data.datasets import Dataset
from engram.train.features.cache import Cache, contents_of

SETS = ("pets", "waste", "textures")
DRAWS, EACH = 3, 10
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS = {"pooled token": slice(-1, None), "all layer statistics": slice(0, None)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_precision", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--backbone", default=str(BACKBONE))
    name = parser.parse_args().backbone
    os.environ["ENGRAM_CACHE"] = str(BUILD / "cache_precision")
    backbone = engram.load_backbone(name)
    preprocessing = engram.MemoryViT(backbone).preprocessing
    caches = {
        precision: Cache(backbone, preprocessing, keeps="statistics", dtype=dtype)
        for precision, dtype in PRECISIONS.items()
    }
    rows = []
    for dataset in SETS:
        splits = load(dataset)
        test = splits["test"]
        asked = rows_of(caches["fp32"], test)
        for head, part in HEADS.items():
            found: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
            for draw in range(DRAWS):
                train = drawn(splits["train"], EACH, draw)
                assert train is not None
                for precision, cache in caches.items():
                    solver = LogisticRegression(C=1 / EACH, max_iter=500)
                    model = make_pipeline(StandardScaler(), solver)
                    model.fit(features(rows_of(cache, train), part), train.labels)
                    right = model.score(features(asked, part), test.labels)
                    found[precision].append(100 * float(right))
            rows.append([dataset, head, *(f"{np.mean(found[p]):.2f}" for p in PRECISIONS)])
            print(*rows[-1], flush=True)
    seconds = {precision: pass_seconds(cache) for precision, cache in caches.items()}
    faster = seconds["fp32"] / seconds["bf16"]
    file = Path(name).name
    about = (
        f"Test accuracy in per cent of linear heads (scikit-learn) on features of "
        f"{TITLES.get(file, file)}, mean of {DRAWS} draws of {EACH} images a class. They learned "
        "from features of a pass in fp32 or in bf16, and answer about features in fp32. The pass "
        f"in bf16 takes {1 / faster:.2f} of the processor time."
    )
    table = markdown_table(("dataset", "head on", *PRECISIONS), rows)
    write_report("cache_precision", "A pass in half precision for the cache", [about, "", *table])


def rows_of(cache: Cache, dataset: Dataset) -> torch.Tensor:
    contents = contents_of(dataset)
    cache.fill(dataset, contents)
    return cache.read(contents)


def features(rows: torch.Tensor, part: slice) -> np.ndarray:
    return rows[:, part].flatten(1).float().numpy()


def pass_seconds(cache: Cache) -> float:
    """Processor time of the pass over a batch of noise: the least of five."""
    height, width = cache.preprocessing.size
    noise = torch.randint(256, (16, height, width, 3), dtype=torch.uint8)
    times = []
    for _ in range(5):
        began = time.process_time()
        cache.compute(noise)
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    main()
