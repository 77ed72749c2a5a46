"""Training: from a task and its data to an engram.

Start in `fit.py`, which reads from top to bottom; `add_classes.py` and `teach.py` are other ways to
a task. The rest, by what it is about:

    a run      run.py (its folder and its end), result.py, identity.py, callbacks.py, trackers.py
    settings   recipe.py, options.py; job.py is a run of the command line
    batches    feeds.py: through the backbone, or from the cache (cache.py, caches.py)
    the loop   training.py takes the steps of trainers (task_trainer.py), validates, checkpoints
    estimates  validation.py, image_statistics.py
    no steps   solve.py (columns.py, dual_solver.py), bank.py of good images
    searches   sweep.py (variants.py); auto.py (screening.py, own_pass.py)
"""
