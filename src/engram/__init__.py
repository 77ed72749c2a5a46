"""Engram: one frozen Vision Transformer, any number of tasks, through learnable memory."""

from engram.errors import EngramError
from engram.vit import ViT, random_trunk

__version__ = "0.1.0"

__all__ = ["EngramError", "ViT", "random_trunk"]
