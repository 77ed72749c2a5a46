"""Training: from a task and its data to an engram.

Start in `fit.py`, which reads from top to bottom; `add_classes.py`, `teach.py` and `words.py` are
other ways to a task. Settings are in `recipe.py` and `options.py`, and `job.py` is a run of the
command line, with its backbone (`backbone.py`) and what it says first (`opening.py`). Below them:

    search/     several trainings, and the best of them: sweeps, and `auto`
    heads/      heads that are solved instead of trained
    loop/       steps, validation, estimates, checkpoints
    features/   batches: through the backbone, or from the cache of what its layers gave
    runs/       the folder of a run, its result, its identity, callbacks and logs
"""
