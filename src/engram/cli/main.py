"""The entry point: run a command, and turn every failure into a sentence and an exit code.

The command modules import what they need when they run, so that `engram --help` answers at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import typer

from engram.cli import (  # noqa: F401
    backbone_commands,
    curation_commands,
    experiment_commands,
    export_command,
    farm_command,
    inference_commands,
    predict_command,
    service_commands,
    store_commands,
    training_commands,
)
from engram.cli.shared import app
from engram.cli.terminal import complain, notice_or_warning
from engram.errors import LOST_WORKER, EngramError, Interrupted, is_lost_worker, naming_flags
from engram.util.worker_processes import ignore_pillow_warnings

#: The commands in the order of `engram --help`, in groups.
_GROUPS = {
    "Begin": ("demo", "data", "check", "backbones"),
    "Train": ("fit", "teach", "sweep", "farm", "cache", "suggest"),
    "Use": ("predict", "eval", "embed", "serve", "label-studio", "export", "drift"),
    "Engrams": ("inspect", "list", "compose", "merge", "bundle", "push", "pull", "convert"),
    "Measure": ("bench", "reproduce"),
}


_USAGE_ERROR: Any = typer.BadParameter.__base__  # typer has this class, and no public name for it


@cache
def _commands() -> Any:
    """The command that typer makes of `app`, once a process: making it takes longer than most."""
    group: Any = typer.main.get_command(app)
    for panel, names in _GROUPS.items():
        for name in names:
            group.commands[name] = command = group.commands.pop(name)  # at the end
            command.rich_help_panel = panel
    return group


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code: 0, 2 after a user's mistake, 1 after ours.

    A mistake is one sentence on stderr; with `--json`, stdout holds {"error": the sentence}.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter is no error
            stream.reconfigure(errors="replace")
    warnings.formatwarning = notice_or_warning
    ignore_pillow_warnings()
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidies up, as Ctrl-C does
    try:
        with naming_flags():
            code = _commands()(args=given, prog_name="engram", standalone_mode=False) or 0
        if code == 130:  # how typer ends after Ctrl-C
            print("Stopped.", file=sys.stderr)
        return int(code)
    except SystemExit as stop:  # after shell completion, and where nobody reads the output
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except _USAGE_ERROR as error:
        if message := error.format_message():  # none where help was printed instead
            path = error.ctx.command_path if error.ctx else "engram"
            sentence = f"{message.rstrip('.')}; `{path} --help` lists what it takes."
            complain(sentence, "--json" in given)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except Interrupted as stop:
        complain(str(stop), as_json=False)
        return 130
    except EngramError as error:
        complain(str(error), "--json" in given)
        return 2
    except OSError as error:  # of the machine: a full disk, a folder that may not be read
        what = f"{error.filename} cannot be used" if error.filename else "The output was lost"
        complain(f"{what} ({error.strerror or error}).", "--json" in given)
        return 2
    except Exception as error:
        if os.environ.get("ENGRAM_DEBUG"):
            raise
        if is_lost_worker(error):
            complain(LOST_WORKER, "--json" in given)
            return 2
        complain(
            f"Something went wrong inside engram ({type(error).__name__}: {error}); please report "
            "it with the command you ran. ENGRAM_DEBUG=1 shows where.",
            "--json" in given,
        )
        return 1
