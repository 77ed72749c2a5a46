"""Training: from a task and its data to an engram.

The command line, experiments and reports import it. Start in `fit.py`, which reads from top to
bottom; `feeds.py` says where the numbers come from, `sweep.py` trains many variants in one pass.
"""
