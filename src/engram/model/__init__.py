"""`MemoryViT`: a frozen backbone and the tasks attached to it, which answer in one pass.

Start in `memory_vit.py`. `passes.py` joins tasks, runs a pass and gives the head inputs.
"""

from engram.model.memory_vit import MemoryViT as MemoryViT
