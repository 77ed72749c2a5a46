"""`engram trunks`: the recommended trunks, and `engram trunks get`, which fetches one."""

from __future__ import annotations

from typing import Annotated

import typer

from engram.cli.app import Json, app
from engram.cli.progress import bars
from engram.cli.terminal import announce, show
from engram.util.description import Description
from engram.util.invocation import program

trunks_app = typer.Typer(help="The recommended trunks (backbones), and which are on this machine.")
app.add_typer(trunks_app, name="trunks")


@trunks_app.callback(invoke_without_command=True)
def trunks_command(context: typer.Context, as_json: Json = False) -> None:
    """List the recommended trunks (backbones), and which are on this machine."""
    if context.invoked_subcommand is not None:
        return
    from engram.experiments.trunk_table import list_trunks

    with bars(as_json) as progress:
        progress("measuring the speed of one layer of each trunk", 0, 0)
        table = list_trunks()
    show(table, as_json)


@trunks_app.command(name="get")
def get_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of the list, or a Hub id.")],
    as_json: Json = False,
) -> None:
    """Fetch a trunk from the Hub into its cache, and check that it can be loaded."""
    from engram.trunks.get import get_trunk

    with bars(as_json) as progress:
        trunk, folder = get_trunk(name, announce=announce, progress=progress)
    parameters = sum(parameter.numel() for parameter in trunk.parameters())
    document = {
        "source": trunk.source,
        "folder": str(folder),
        "parameters": parameters,
        "fingerprint": trunk.fingerprint,
    }
    rows = [
        ("trunk", trunk.source),
        ("folder", str(folder)),
        ("parameters", f"{parameters:,}"),
        ("fingerprint", trunk.fingerprint),
        ("use it", f"{program()} fit photos --task NAME --backbone {name} -o NAME.safetensors"),
    ]
    show(Description(document, rows), as_json)
