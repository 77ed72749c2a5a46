"""`MemoryViT`: a frozen backbone and the tasks attached to it, which answer in one pass.

Start in `memory_vit.py`. `head_inputs.py` chooses and runs the pass, `attention.py` makes maps of
what a task reads.
"""

from engram.model.memory_vit import MemoryViT as MemoryViT
