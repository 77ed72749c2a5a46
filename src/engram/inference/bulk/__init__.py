"""Answers about any number of images: they are streamed, and only a part of them is in memory.

`predict_to.py` is the place to start: it takes images from `sources.py` and
`tar_files.py`, leaves out those whose answers are on disk (`parts.py`), has the others answered in
batches, and writes parts of a table (`table_formats.py`). `answering.py` is what happens to a
batch: the processes of `decoders.py` decode it, and the model answers. The command line and
`cluster/`, which answers batches on other machines, import it; it imports what `predict` imports.
"""
