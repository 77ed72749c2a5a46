"""Programs that show or measure Engram: the demo, the bench, the paper's tables.

They use everything below them and only the command line imports them. Start in `demo.py` for a
tour of the package in use, in `timing.py` for how speed is measured.
"""
