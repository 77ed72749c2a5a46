"""Engram: one frozen Vision Transformer, any number of tasks, through learnable memory."""

from engram.checkpoints import load_trunk, save_trunk
from engram.errors import EngramError
from engram.files import read_engram as inspect
from engram.model import MemoryViT
from engram.vit import ViT, random_trunk

__version__ = "0.1.0"

__all__ = ["EngramError", "MemoryViT", "ViT", "inspect", "random_trunk"]
