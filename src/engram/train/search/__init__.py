"""Several trainings, and the best of them.

`sweep.py` trains the variants of a regime (`variants.py`), together where their tasks fit into one
pass; `auto.py` tries several regimes, trains what a short training recommends (`screening.py`), and
can try those that need a pass of their own (`own_pass.py`).
"""
