"""`engram backbones`, the recommended ones, and `engram cache`, what tasks train from."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from engram.cli import shared
from engram.cli.flags import argument, option
from engram.cli.terminal import Watch, announce, bars
from engram.util.invocation import program
from engram.util.text import Description, counted

if TYPE_CHECKING:
    from engram.vit.vit import ViTConfig

_BATCH, _PASSES, _SECONDS = 2, 3, 0.15
_COLUMNS = ("name", "parameters", "download", "licence", "accuracy", "images/s", "here")

backbones_app = typer.Typer(help="The recommended backbones, and which are on this machine.")
shared.app.add_typer(backbones_app, name="backbones")


@shared.command(group=backbones_app)
def backbones_command(context: typer.Context, *, as_json: bool) -> Description | None:
    """List the recommended backbones, and which are on this machine."""
    if context.invoked_subcommand is not None:
        return None
    from engram.backbones.load import load_backbone
    from engram.backbones.recommended import PICO, RECOMMENDED, RecommendedBackbone

    with bars(as_json, "measuring the speed of one layer of each backbone"):
        config, about = load_backbone(PICO).config, "images of up to 48 pixels"
        pico = RecommendedBackbone(PICO, PICO, about, config, image_size=config.image_size[0])
        entries: list[dict[str, Any]] = [
            {
                "name": backbone.name,
                "source": backbone.repo,
                "parameters": backbone.parameters,
                "download": 0 if backbone is pico else backbone.download,
                "licence": backbone.licence,
                "accuracy": backbone.accuracy,
                "image_size": backbone.image_size,
                "images_per_second": estimated_speed(backbone.config, backbone.image_size),
                "on_this_machine": backbone is pico or backbone.on_this_machine,
                "about": backbone.about,
            }
            for backbone in (*RECOMMENDED, pico)
        ]
    rows = [
        *((entry["name"], f"{entry['source']}: {entry['about']}") for entry in entries),
        ("get one", f"{program()} backbones get {RECOMMENDED[0].name}"),
        ("accuracy", "of fit with its defaults, the mean of nine datasets of 600 to 1,020 images"),
        ("images/s", "of the plain backbone on this CPU, estimated from one layer just now"),
        ("here", "whether it is on this machine and needs no network"),
    ]
    return Description({"backbones": entries}, rows, _COLUMNS, list(map(_row, entries)))


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    speed, accuracy = entry["images_per_second"], entry["accuracy"]
    return (
        entry["name"],
        f"{entry['parameters'] / 1e6:.1f} M",
        f"about {entry['download'] / 1e6:.0f} MB" if entry["download"] else "bundled",
        entry["licence"],
        f"{accuracy:.1f} %" if accuracy else "not run",
        f"{speed:.{0 if speed >= 10 else 1}f}",
        "yes" if entry["on_this_machine"] else "no",
    )


def estimated_speed(config: ViTConfig, side: int) -> float:
    """Images per second of a plain pass on this CPU, from the time of one layer.

    Time does not depend on the values of weights, and all layers take the same.
    """
    import torch

    from engram.backbones.shape import BackboneShape
    from engram.tasks.costs import backbone_macs
    from engram.vit import ViT

    size = (side, side)
    one = replace(config, image_size=size, depth=1, head=None)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        layer, pixels = ViT(one).eval(), torch.zeros(_BATCH, 3, *size)
        layer.tokens(pixels)  # the first pass is slower
        times: list[float] = []
        while len(times) < _PASSES or sum(times) < _SECONDS:
            began = time.perf_counter()
            layer.tokens(pixels)
            times.append(time.perf_counter() - began)
    macs, whole = (backbone_macs(BackboneShape.measure(shape), size) for shape in (one, config))
    return _BATCH * macs / whole / min(times)


@shared.command("get", group=backbones_app)
def get_command(
    name: str = argument("NAME", "A name of the list, or a Hub id."), *, progress: Watch
) -> Description:
    """Fetch a backbone from the Hub into its cache, and check that it can be loaded."""
    from engram.backbones.load import get_backbone

    backbone, folder = get_backbone(name, announce=announce, progress=progress)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    document = {
        "source": backbone.source,
        "folder": str(folder),
        "parameters": parameters,
        "fingerprint": backbone.fingerprint,
    }
    rows = [
        ("backbone", backbone.source),
        ("folder", str(folder)),
        ("parameters", f"{parameters:,}"),
        ("fingerprint", backbone.fingerprint),
        ("use it", f"{program()} fit photos --task NAME --backbone {name} -o NAME.safetensors"),
    ]
    return Description(document, rows)


# The cache

cache_app = typer.Typer(
    help="The cache of the backbone's tokens, which tasks train from.", no_args_is_help=True
)
shared.app.add_typer(cache_app, name="cache")


@shared.command("info", group=cache_app)
def cache_info() -> Description:
    """Print where the cache is and what it holds."""
    from engram.train.features.caches import default_root, info, limit

    entries, folder = info(), str(default_root())
    total, most = sum(entry["bytes"] for entry in entries), limit()
    table = tuple(
        (
            entry["backbone"],
            f"{entry['images']:,}",
            f"{entry['bytes'] / 1e9:.2f} GB",
            "x".join(map(str, entry["preprocessing"]["size"])),
            entry["view"]["augment"],
            counted(int((time.time() - entry["used"]) // 86_400), "day") + " ago",
        )
        for entry in sorted(entries, key=lambda entry: -float(entry["used"]))
    )
    shown_limit = "none (ENGRAM_CACHE_LIMIT)" if math.isinf(most) else f"{most / 1e9:g} GB"
    rows = [("folder", folder), ("caches", str(len(entries)))]
    rows += [("size", f"{total / 1e9:.2f} GB"), ("limit", shown_limit)]
    columns = ("backbone", "images", "size", "pixels", "view", "used")
    document = {
        "folder": folder,
        "bytes": total,
        "limit": None if math.isinf(most) else most,
        "caches": entries,
    }
    return Description(document, rows, columns, table)


@shared.command("clear", group=cache_app)
def cache_clear(
    backbone: str | None = option(
        None, "Only what belongs to this backbone: its name, or the beginning of its fingerprint."
    ),
    unused: float = option(
        None, "Only what no run used for so many days.", default=0.0, metavar="DAYS", min=0
    ),
    down_to: float = option(
        None,
        "Remove what was not used for longest, until the rest takes at most so many GB.",
        default=0.0,
        metavar="GB",
        min=0,
    ),
) -> Description:
    """Remove everything from the cache, or what the flags choose."""
    from engram.train.features.caches import clear

    freed = clear(backbone=backbone, unused_days=unused, down_to=down_to * 1e9)
    return Description({"freed": freed}, [("freed", f"{freed / 1e9:.2f} GB")])
