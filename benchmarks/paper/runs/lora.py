"""LoRA of rank 8 by PEFT, on transformers' own ViT with the same weights, images, schedule."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.paper.runs import datasets
from benchmarks.paper.runs.through_backbone import BackboneRun, about_run
from benchmarks.paths import ASSETS
from engram.data.datasets import Dataset, Splits
from engram.data.loader import Loader
from engram.images.preprocessing import Preprocessing, normalise
from engram.tasks.metrics import classification_metrics
from engram.train.recipe import Recipe

#: Folders of transformers.
FOLDERS = {
    **datasets.WEIGHTS,
    datasets.VIT_TI: ASSETS / "weights" / "vit_tiny_patch16_224" / "transformers",
}
RANK = 8


@dataclass(frozen=True)
class LoraRun(BackboneRun):
    """As `BackboneRun`: AdamW, cosine schedule, clipping and epochs are those of the recipe."""

    def train(self, lr: float) -> tuple[Any, dict[str, Any]]:
        began = time.process_time()
        setting, data = self.setting, self._data
        recipe = setting.recipe(lr, self.seed)
        model = self._model(len(data.classes))
        learned = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr, weight_decay=recipe.weight_decay)
        loader = self._loader(data["train"], "train", recipe)
        steps = setting.epochs * -(-len(data["train"]) // setting.batch)
        batches = (batch for epoch in range(setting.epochs) for batch in loader.epoch(epoch))
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at(step, steps, lr)
            loss = F.cross_entropy(self._logits(model, batch.images), batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(learned, recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
        val = classification_metrics(self._answers(model, data["val"]))
        head = sum(p.numel() for n, p in model.named_parameters() if "classifier" in n)
        parameters = sum(p.numel() for p in learned) - head // 2  # PEFT keeps the old head, too
        return model, about_run(self.seed, val, parameters, began)

    def save(self, model: Any, path: Path) -> None:
        learned = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        save_file(learned, path)

    def load(self, path: Path) -> Any:
        model = self._model(len(self._data.classes))
        model.load_state_dict(load_file(path), strict=False)
        return model

    def evaluate(self, model: Any, data: Splits) -> Mapping[str, Any]:
        return classification_metrics(self._answers(model, data["test"]))

    @property
    def _data(self) -> Splits:
        return datasets.splits(self.setting.set, self.setting.pixels, self.setting.images)

    @property
    def _preprocessing(self) -> Preprocessing:
        return datasets.squashed(self.setting.pixels, self.setting.backbone)

    def _model(self, classes: int) -> Any:
        from transformers import AutoModelForImageClassification

        torch.manual_seed(self.seed)
        model = AutoModelForImageClassification.from_pretrained(
            FOLDERS[self.setting.backbone], num_labels=classes, ignore_mismatched_sizes=True
        )
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"],
            modules_to_save=["classifier"],
        )  # fmt: skip
        return peft.get_peft_model(model, config)

    def _loader(self, dataset: Dataset, mode: str, recipe: Recipe) -> Loader:
        return Loader(
            dataset, self._preprocessing, self.setting.batch,
            mode=mode, augment="none", seed=recipe.data_seed,
        )  # fmt: skip

    def _logits(self, model: Any, images: Tensor) -> Tensor:
        pixels = normalise(images, self._preprocessing)
        half = self.setting.precision == "bf16"
        with torch.autocast("cpu", torch.bfloat16, half):
            logits: Tensor = model(pixel_values=pixels).logits
        return logits.float()

    def _answers(self, model: Any, dataset: Dataset) -> tuple[Tensor, Tensor]:
        model.eval()
        loader = self._loader(dataset, "eval", self.setting.recipe(1e-3))
        with torch.no_grad():
            found = [(self._logits(model, batch.images), batch.labels) for batch in loader.epoch(0)]
        model.train()
        logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logits, labels
