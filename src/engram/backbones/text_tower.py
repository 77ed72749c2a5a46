"""The text tower of a CLIP, SigLIP or SigLIP 2: texts as vectors in the space of its images.

transformers runs it. It is needed once, where words become the classes of a task.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.backbones.load import locate, read_json
from engram.errors import EngramError
from engram.util import hub
from engram.util.optional import require
from engram.util.text import explained, first_line

FAMILIES = ("clip", "siglip")  # the model_type of SigLIP 2 of fixed resolution is siglip, too
_FILES = ("*.json", "*.txt", "*.model", "model.safetensors", "model-*.safetensors")
_BATCH = 256  # texts


class TextTower:
    """Embeds texts. Logits of an image are `scale * cosine + bias`, as the model was trained.

    `by_itself`: whether the probability of a text is a sigmoid of its logit (SigLIP), and not a
    softmax over all texts.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        transformers = require("transformers", extra="words", purpose="The text tower")
        folder = _locate_both_towers(source)
        with explained(
            lambda error: f"The text tower of {source} cannot be loaded: {first_line(error)}."
        ):
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            logging = transformers.utils.logging
            shown = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            try:
                self._model = transformers.AutoModel.from_pretrained(
                    folder, use_safetensors=True, dtype=torch.float32
                )
            finally:
                if shown:
                    logging.enable_progress_bar()
            self._model.eval().requires_grad_(False)
        config = self._model.config
        self._length = int(config.text_config.max_position_embeddings)
        self.by_itself = config.model_type == "siglip"
        self.scale = float(self._model.logit_scale.exp())
        self.bias = float(self._model.logit_bias) if self.by_itself else 0.0

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Vectors of length 1: (texts, width)."""
        rows = []
        for start in range(0, len(texts), _BATCH):
            tokens = self._tokenizer(
                list(texts[start : start + _BATCH]),
                # SigLIP was trained with texts that are padded to one length.
                padding="max_length" if self.by_itself else True,
                max_length=self._length,
                truncation=True,
                return_tensors="pt",
            )
            known = {k: v for k, v in tokens.items() if k in ("input_ids", "attention_mask")}
            if self.by_itself:
                known.pop("attention_mask", None)  # and without a mask
            with torch.inference_mode():
                found = self._model.get_text_features(**known)
            found = found if isinstance(found, Tensor) else found.pooler_output
            rows.append(F.normalize(found.float(), dim=-1))
        return torch.cat(rows).clone()


def _locate_both_towers(source: str | os.PathLike[str]) -> Path:
    """The folder of a model with a text tower; of the Hub, with the files of its tokenizer."""
    name, folder = locate(source)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("model_type") not in FAMILIES or "text_config" not in config:
        raise EngramError(
            f"{name} has no text tower: words need a CLIP, a SigLIP or a SigLIP 2 of transformers "
            "with both towers, such as openai/clip-vit-base-patch32."
        )
    if not Path(name).exists():
        repo, _, revision = name.partition("@")
        folder = hub.fetch(repo, _FILES, revision or None)
    return folder
