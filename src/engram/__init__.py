"""Engram: one frozen Vision Transformer, any number of tasks, through learnable memory.

The map, from the top down. A module imports only what is below it, and import-linter checks that:

    cli           the commands: parse, call, print
    cluster       the same work on more than one machine, with Ray
    farm          many trainings from one file of jobs
    experiments   the demo, the speed measurements, the paper's tables
    serve         the HTTP service and its page
    report        the HTML page about tasks
    train         from a task and its data to an engram
    export        ONNX and torch.export files
    inference     evaluate, predict, embed
    model.py      MemoryViT: a trunk and the tasks attached to it
    attention.py  what a task reads of every patch
    sights.py     what the head of each task is given of images
    pretrained.py  from_pretrained, save_pretrained, push_to_hub
    composition.py  the base of MemoryViT: add, attach, detach and save tasks
    prepared.py   what tasks bring into a pass that depends on no image
    store         engrams on disk and on the Hub
    data          where labelled images come from
    tasks         what a task is: regime, kind, head, metrics, costs
    routing.py    a task per image: streams of a batch whose images ask for different tasks
    passes.py     the passes: how trunk and tasks go through the layers
    memory.py     the paper: cells, and which stream reads which
    readout.py    what a head sees of every layer
    side.py       side patches: a thin copy of the picture beside the trunk
    squares.py    the means of squares of the picture, which keep where things are
    adapters.py   the bottleneck adapters of the paper's comparison
    trunks        other people's ViT files become a trunk
    vit.py        the ViT itself
    layers.py     its configuration, its layer and its head
    positions.py  rotary positions, waves, and resized ones
    images        decode, preprocess, augment
    util          files, text, processes, the Hub
    errors.py     what users see when something is wrong

Start with `memory.py`, then `model.py`. docs/architecture.md follows an image through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram import data as data
    from engram import export as export
    from engram import images as images
    from engram import store as store
    from engram import tasks as tasks
    from engram.errors import EngramError
    from engram.inference.embed import embed
    from engram.inference.evaluate import evaluate
    from engram.inference.load import load_model
    from engram.inference.pipeline import pipeline
    from engram.inference.predict import predict
    from engram.model import MemoryViT
    from engram.store.bundles import compose
    from engram.store.format import read_engram as inspect
    from engram.store.merging import merge
    from engram.store.remote import list_engrams as list  # noqa: F401
    from engram.store.sharing import pull, push
    from engram.train.add_classes import add_classes
    from engram.train.auto import auto
    from engram.train.callbacks import Callback
    from engram.train.fit import fit
    from engram.train.for_trainer import ForTrainer
    from engram.train.recipe import Recipe
    from engram.train.sweep import sweep
    from engram.train.trainable import train_only
    from engram.trunks.load import load_trunk, save_trunk
    from engram.trunks.objects import from_timm, from_transformers
    from engram.trunks.random import random_trunk
    from engram.vit import ViT

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "EngramError",
    "ForTrainer",
    "MemoryViT",
    "Recipe",
    "ViT",
    "add_classes",
    "auto",
    "compose",
    "embed",
    "evaluate",
    "fit",
    "from_timm",
    "from_transformers",
    "inspect",
    "load_model",
    "load_trunk",
    "merge",
    "pipeline",
    "predict",
    "pull",
    "push",
    "random_trunk",
    "save_trunk",
    "sweep",
    "train_only",
]

# Where the public names live; the folders are those whose names the reference writes out.
_HOMES = {
    "Callback": "train.callbacks:Callback",
    "EngramError": "errors:EngramError",
    "ForTrainer": "train.for_trainer:ForTrainer",
    "MemoryViT": "model:MemoryViT",
    "Recipe": "train.recipe:Recipe",
    "ViT": "vit:ViT",
    "add_classes": "train.add_classes:add_classes",
    "auto": "train.auto:auto",
    "compose": "store.bundles:compose",
    "data": "data",
    "embed": "inference.embed:embed",
    "evaluate": "inference.evaluate:evaluate",
    "export": "export",
    "fit": "train.fit:fit",
    "from_timm": "trunks.objects:from_timm",
    "from_transformers": "trunks.objects:from_transformers",
    "images": "images",
    "inspect": "store.format:read_engram",
    # Not in __all__: `import *` must not hide Python's own.
    "list": "store.remote:list_engrams",
    "load_model": "inference.load:load_model",
    "load_trunk": "trunks.load:load_trunk",
    "merge": "store.merging:merge",
    "pipeline": "inference.pipeline:pipeline",
    "predict": "inference.predict:predict",
    "pull": "store.sharing:pull",
    "push": "store.sharing:push",
    "random_trunk": "trunks.random:random_trunk",
    "save_trunk": "trunks.load:save_trunk",
    "store": "store",
    "sweep": "train.sweep:sweep",
    "tasks": "tasks",
    "train_only": "train.trainable:train_only",
}

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> Sequence[str]:
    return sorted({*globals(), *_HOMES})
