"""The paper's experiments on a real ViT-Ti/16; their tables are in benchmarks/results/paper.md.

Start with `__main__.py`, the command line. `experiments.py` lists the experiments, `queue.py` all
runs in the order of their value, and `worker.py` works through them. `runs/` trains and measures,
`records.py` stores the results, `page.py` writes the tables.
"""
