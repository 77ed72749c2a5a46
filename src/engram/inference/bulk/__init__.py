"""Answers about any number of images: they are streamed, and only a part of them is in memory.

`job.py` is the place to start: it reads images from `sources.py`, has them decoded by the processes
of `decoders.py`, asks the model, and writes parts of a table (`tables.py`). A part that is written
is not computed again. The command line imports it; it imports what `predict` imports.
"""
