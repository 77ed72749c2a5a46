"""`python -m engram` is the command `engram`; torchrun starts it this way."""

from __future__ import annotations

import sys


def main() -> int:
    """The command, from its first import on: Ctrl-C while they last is no traceback."""
    try:
        from engram.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
