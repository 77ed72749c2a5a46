"""Heads that are solved instead of trained: `solve.py`.

`columns.py` says which features such a head can read, `dual_solver.py` solves where images are
fewer than these.
"""
