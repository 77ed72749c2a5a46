"""Engrams on disk and on the Hub: the file format, bundles, cards, old checkpoints.

`model.py` and all above it import this folder; it knows tasks and trunks but no model. Start in
`engram.py` (what an engram is) and `format.py` (its file).
"""
