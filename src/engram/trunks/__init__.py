"""Other people's ViT files become one plain ViT, the trunk; `pico/` is the bundled one.

The store, experiments and the public surface import it. Start in `load.py`; `layouts.py` holds one
table for each layout of tensors.
"""
