"""Batches of what tasks read of the backbone: `feeds.py`, live or from the cache (`cache.py`).

`caches.py` lists and removes the caches of this machine.
"""
