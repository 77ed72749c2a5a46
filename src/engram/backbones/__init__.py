"""ViT weights of other libraries become a `ViT`, the backbone; `pico/` is the bundled one.

Start in `load.py` (from files) or `in_memory.py` (from a model in memory). Both use `build.py`;
`layouts.py` has the tables of tensor names, which `translate.py` applies, `configs.py`
reads the configurations, `shape.py` has the limits, and `recommended.py` is the table of `engram
backbones`.
"""
