"""A run: its folder and its end (`run.py`), its result and identity, its callbacks and logs."""
