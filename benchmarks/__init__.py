"""Benchmarks of Engram; each is run as a module, such as `python -m benchmarks.speed`.

README.md lists them with what they measure, how long they take and where their results are.
`paths.py`, `report.py` and `command.py` are what they share. Nothing in the package imports them.
"""

import engram  # noqa: F401  before torch: it sets how torch's threads wait, as the command does
