"""ViT weights of other libraries become a `ViT`, the backbone; `pico/` is the bundled one.

The store, the experiments and the public functions import this folder. Start in `load.py` (from
files) or `objects.py` (from a model in memory). Both use `build.py`; `layouts.py` has one table of
tensor names per layout, and `configs.py` and `timm_configs.py` read the configurations.
`families.py` lists what can be read, `recommended.py` is the table of `engram backbones`, and
`choose.py` is `--backbone auto`.
"""
