"""One plain Vision Transformer, readable in one sitting: `vit.py`, `layers.py`, `pos_embed.py`.

It knows nothing of tasks. How a layer attends is an argument of `Block`, so everything that the
methods do beside it needs no second implementation of a layer.
"""

from engram.vit.vit import ViT as ViT
