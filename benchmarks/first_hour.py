"""The first hour of a new user: how long, how much is printed, how good, with nothing but defaults.

    python -m benchmarks.first_hour

Each row is `engram fit PHOTOS --task NAME -o FILE` and `engram eval` as the README shows them, in
an empty folder, with an empty cache, and with stdout and stderr in a pipe, as for a log file. The
backbone is the one that `fit` chooses: with an empty cache of the Hub and no network, with a real
ViT-Ti/16 in it, and with DINOv2-small, if it is in ENGRAM_BACKBONES. The photographs are pets,
flowers and textures, and a folder as it comes from phones: HEIC, rotated JPEGs, screenshots and
videos. It takes about twenty minutes on two idle cores, needs the assets folder (../shared, or
ENGRAM_ASSETS), and writes benchmarks/results/first_hour.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.paths import ASSETS, BACKBONE, DINOV2_SMALL, require_backbone
from benchmarks.report import markdown_table, write_report
from benchmarks.speed.processes import peak_memory
from engram.util.text import storage

VIT, DINOV2 = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", "facebook/dinov2-small"
COLUMNS = (
    "photographs",
    "backbone that was chosen",
    "first line",
    "longest silence",
    "lines",
    "fit in total",
    "memory",
    "cache",
    "regime that was kept",
    "validation accuracy",
    "test accuracy",
)
_ROTATED = 6  # EXIF: turn the image by 90 degrees


@dataclass(frozen=True)
class Printed:
    """What a command printed, and when, in seconds from its start."""

    lines: tuple[tuple[float, str], ...]
    seconds: float
    memory: int  # bytes, the most that its processes had at once

    @property
    def longest_silence(self) -> float:
        times = [0.0, *(second for second, _ in self.lines), self.seconds]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_hour", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument(
        "--only", action="append", help="pets, flowers, textures or phone; repeatable"
    )
    only = parser.parse_args().only
    require_backbone()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        phone = phone_photographs(folder / "phone")
        real, nothing = hub_cache(folder / "hub"), folder / "no-hub"
        names = ("pets", "flowers", "textures")
        pets, flowers, textures = (ASSETS / "data" / name for name in names)
        dinov2 = [("textures", textures, hub_with_dinov2(folder / "hub-dinov2"))]
        rows = [
            first_result(folder / str(i), name, data, hub)
            for i, (name, data, hub) in enumerate(
                [
                    ("phone", phone, real),
                    ("pets", pets, real),
                    ("flowers", flowers, real),
                    ("pets", pets, nothing),
                    *(dinov2 if DINOV2_SMALL.exists() else []),
                ]
            )
            if not only or name in only
        ]
    write_report("first_hour", "The first hour, with nothing but defaults", [
        *markdown_table(COLUMNS, rows), "",
        "The row with pico is a machine without a network: `fit` says that the bundled backbone "
        "sees 32 pixels and which command fetches a better one.",
        *([f"\nMeasured with `--only {' --only '.join(only)}`."] if only else []),
    ])  # fmt: skip


def first_result(folder: Path, name: str, data: Path, hub: Path) -> list[str]:
    """One row: train with the defaults, then measure on the test images."""
    folder.mkdir()
    file = folder / f"{name}.safetensors"
    fit = run(folder, hub, "fit", data, "--task", name, "-o", file)
    described = document(folder, hub, "inspect", file)
    test = ""
    if (data / "test").is_dir():
        scores = document(folder, hub, "eval", file, "--data", f"{name}={data}")
        test = f"{scores[name]['accuracy']:.1%}"
    return [
        name,
        described["backbone"]["source"],
        f"{fit.lines[0][0]:.1f} s",
        f"{fit.longest_silence:.1f} s",
        str(len(fit.lines)),
        f"{fit.seconds:.0f} s",
        storage(fit.memory),
        storage(sum(file.stat().st_size for file in (folder / "cache").rglob("*.data"))),
        described["task"]["regime"],
        f"{described['metrics']['val']['accuracy']:.1%}",
        test,
    ]


# Commands


def run(folder: Path, hub: Path, *arguments: str | Path) -> Printed:
    """Run a command as a user does who keeps its output in a file, and note when lines come."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command(arguments), cwd=folder, env=environment(folder, hub), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    with peak_memory(process.pid) as peak:
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip("\n")))
            print(f"{lines[-1][0]:7.1f}  {lines[-1][1]}", flush=True)
    if process.wait():
        sys.exit(f"{arguments[0]} ended with exit code {process.returncode}.")
    return Printed(tuple(lines), time.perf_counter() - began, peak()["peak"])


def document(folder: Path, hub: Path, *arguments: str | Path) -> Any:
    """What a command prints as JSON."""
    done = subprocess.run(
        [*command(arguments), "--json"],
        cwd=folder, env=environment(folder, hub), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def command(arguments: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "engram", *map(str, arguments)]


def environment(folder: Path, hub: Path) -> Mapping[str, str]:
    """A machine without a network, with this cache of the Hub and an empty cache of tokens."""
    own = {"ENGRAM_CACHE": folder / "cache", "HF_HUB_CACHE": hub, "HF_HUB_OFFLINE": 1}
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


# What a user has


def hub_cache(folder: Path) -> Path:
    """A cache of the Hub with a real ViT-Ti/16."""
    snapshot = _snapshot(folder, VIT)
    shutil.copy(BACKBONE, snapshot / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 1000}
    normalisation = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
    about = {"input_size": [3, 224, 224], "crop_pct": 0.9, **normalisation}
    (snapshot / "config.json").write_text(json.dumps({**config, "pretrained_cfg": about}))
    return folder


def hub_with_dinov2(folder: Path) -> Path:
    """A cache of the Hub with DINOv2-small, where there is one."""
    if DINOV2_SMALL.exists():
        shutil.copytree(DINOV2_SMALL, _snapshot(folder, DINOV2), dirs_exist_ok=True)
    return folder


def _snapshot(folder: Path, name: str) -> Path:
    """The folder for the files of a repository, as a download leaves it."""
    repo = folder / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return snapshot


def phone_photographs(folder: Path, classes: int = 8) -> Path:
    """Photographs of some pets, in the formats and with the clutter that phones leave."""
    import pillow_heif

    pillow_heif.register_heif_opener()
    for label in sorted((ASSETS / "data" / "pets" / "train").iterdir())[:classes]:
        place = folder / label.name
        place.mkdir(parents=True)
        for i, path in enumerate(sorted(label.iterdir())):
            image = Image.open(path).convert("RGB")
            name = place / f"IMG_{i:04}"
            if i % 4 == 0:
                image.save(name.with_suffix(".HEIC"), "HEIF", quality=80)
            elif i % 4 == 1:
                exif = Image.Exif()
                exif[0x0112] = _ROTATED
                turned = image.transpose(Image.Transpose.ROTATE_90)
                turned.save(name.with_suffix(".JPG"), "JPEG", exif=exif)
            elif i % 4 == 2:
                image.convert("RGBA").save(name.with_suffix(".PNG"))
            else:
                image.save(name.with_suffix(".webp"))
        (place / "IMG_0000.MOV").write_bytes(b"\0\0\0\x14ftypqt  ")
        (place / "._IMG_0001.JPG").write_bytes(b"\0\5\x16\7")
        (place / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    return folder


if __name__ == "__main__":
    main()
