"""`engram backbones`: the recommended backbones, and `engram backbones get`, which fetches one."""

from __future__ import annotations

from typing import Annotated

import typer

from engram.cli.app import Json, app
from engram.cli.progress import bars
from engram.cli.terminal import announce, show
from engram.util.description import Description
from engram.util.invocation import program

backbones_app = typer.Typer(help="The recommended backbones, and which are on this machine.")
app.add_typer(backbones_app, name="backbones")


@backbones_app.callback(invoke_without_command=True)
def backbones_command(context: typer.Context, as_json: Json = False) -> None:
    """List the recommended backbones, and which are on this machine."""
    if context.invoked_subcommand is not None:
        return
    from engram.experiments.backbone_table import list_backbones

    with bars(as_json) as progress:
        progress("measuring the speed of one layer of each backbone", 0, 0)
        table = list_backbones()
    show(table, as_json)


@backbones_app.command(name="get")
def get_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of the list, or a Hub id.")],
    as_json: Json = False,
) -> None:
    """Fetch a backbone from the Hub into its cache, and check that it can be loaded."""
    from engram.backbones.get import get_backbone

    with bars(as_json) as progress:
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
    show(Description(document, rows), as_json)
