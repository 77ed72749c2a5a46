"""`python -m engram` is the command `engram`; torchrun starts it this way."""

import sys

from engram.cli import main

if __name__ == "__main__":
    sys.exit(main())
