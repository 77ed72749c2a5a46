"""Pictures in, pixels out: decode safely, crop and resize, normalise, read masks.

Everything above may import it; it knows nothing of models. Start in `decode.py` (what can go wrong
with a file) and `views.py` (what the ViT sees of a picture).
"""
