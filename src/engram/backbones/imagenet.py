"""The class names of ImageNet-1k, for heads that were trained on it and come without names.

Most files of such models say nothing about their classes, and a head of another dataset may have
1,000 classes too. So the head itself is asked: two classes of ImageNet that look alike, such as
`bathtub` and `tub`, have rows of weights that point the same way. In any other order of the
classes, rows at these places have nothing to do with each other.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_FILE = Path(__file__).with_name("imagenet1k.txt")  # a name a line, in the order of the classes

#: Classes that look alike, most of them far apart in the order: bathtub and tub, laptop and
#: notebook, monitor and screen, cassette player and tape player, corn and ear, …
_ALIKE = (
    *((435, 876), (620, 681), (664, 782), (482, 848), (987, 998), (511, 817), (504, 968)),
    *((508, 878), (486, 889), (402, 546), (432, 683), (579, 881), (413, 764), (497, 663)),
    *((665, 670), (407, 734), (547, 820), (440, 907), (400, 667), (505, 849), (445, 638)),
    *((657, 744), (836, 837), (404, 895)),
)
#: The mean cosine of these pairs. AugReg ViT-Ti has 0.65; its classes in 2,000 random orders have
#: 0.08 at most, and moved by one place 0.03.
_LEAST = 0.2


def imagenet_names(weight: Tensor | None) -> tuple[str, ...] | None:
    """The names of a head's classes if its weights (classes, width) are those of ImageNet-1k."""
    if weight is None or weight.ndim != 2 or len(weight) != 1000:
        return None
    rows = F.normalize(weight.detach().float() - weight.detach().float().mean(0), dim=1)
    first, second = torch.tensor(_ALIKE, device=rows.device).T
    if not float((rows[first] * rows[second]).sum(1).mean()) > _LEAST:
        return None
    return tuple(_FILE.read_text(encoding="utf-8").splitlines())
