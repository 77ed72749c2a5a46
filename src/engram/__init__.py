"""Engram: one frozen Vision Transformer, any number of tasks, through learnable memory.

The map, from the top down. A folder imports only what is below it, and import-linter checks that:

    cli           the commands: parse, call, print
    cluster       many trainings from one file, and more than one machine, with Ray
    experiments   the demo, the speed measurements, the paper's tables
    curation      what is wrong with the images, which to label next
    serve         the HTTP service and its page         report   the HTML page about tasks
    train         from a task and its data to an engram
    export        ONNX and torch.export files
    inference     evaluate, predict, embed
    model         MemoryViT: a backbone and the tasks attached to it
    store         engrams on disk and on the Hub
    data          where labelled images come from
    tasks         what a task is: spec, kind, head, metrics, costs
    methods       the paper (memory.py) and its relatives, a class for each
    backbones     other people's ViT files become a backbone
    vit           one plain ViT
    images        decode, preprocess, augment
    util          files, text, processes, the Hub
    errors.py     what users see when something is wrong

Start with `methods/memory.py`, then `model/memory_vit.py`. docs/architecture.md follows an image
through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engram.util.cpus import prepare_threads
from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram import data as data
    from engram import export as export
    from engram import images as images
    from engram import methods as methods
    from engram import store as store
    from engram import tasks as tasks
    from engram.backbones.in_memory import from_timm, from_transformers
    from engram.backbones.load import load_backbone, save_backbone
    from engram.backbones.random import random_backbone
    from engram.errors import EngramError
    from engram.inference.embed import embed
    from engram.inference.engine import load_model
    from engram.inference.evaluate import evaluate
    from engram.inference.pipeline import pipeline
    from engram.inference.predict import predict
    from engram.methods import register
    from engram.model.memory_vit import MemoryViT
    from engram.store.compose import compose
    from engram.store.format import read_engram as inspect
    from engram.store.merging import merge
    from engram.store.remote import list_engrams as list  # noqa: F401
    from engram.store.sharing import pull, push
    from engram.train.add_classes import add_classes
    from engram.train.fit import fit
    from engram.train.loop.trainable import ForTrainer, train_only
    from engram.train.recipe import Recipe
    from engram.train.runs.callbacks import Callback
    from engram.train.search.auto import auto
    from engram.train.search.sweep import sweep
    from engram.train.teach import forget, teach
    from engram.vit.vit import ViT

prepare_threads()  # before anything imports torch

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
    "forget",
    "from_timm",
    "from_transformers",
    "inspect",
    "load_backbone",
    "load_model",
    "merge",
    "pipeline",
    "predict",
    "pull",
    "push",
    "random_backbone",
    "register",
    "save_backbone",
    "sweep",
    "teach",
    "train_only",
]

# Where the public names live; the folders are those whose names the reference writes out.
_HOMES = {
    "Callback": "train.runs.callbacks:Callback",
    "EngramError": "errors:EngramError",
    "ForTrainer": "train.loop.trainable:ForTrainer",
    "MemoryViT": "model:MemoryViT",
    "Recipe": "train.recipe:Recipe",
    "ViT": "vit:ViT",
    "add_classes": "train.add_classes:add_classes",
    "auto": "train.search.auto:auto",
    "compose": "store.compose:compose",
    "data": "data",
    "embed": "inference.embed:embed",
    "evaluate": "inference.evaluate:evaluate",
    "export": "export",
    "fit": "train.fit:fit",
    "forget": "train.teach:forget",
    "from_timm": "backbones.in_memory:from_timm",
    "from_transformers": "backbones.in_memory:from_transformers",
    "images": "images",
    "inspect": "store.format:read_engram",
    # Not in __all__: `import *` must not hide Python's own.
    "list": "store.remote:list_engrams",
    "load_model": "inference.engine:load_model",
    "load_backbone": "backbones.load:load_backbone",
    "merge": "store.merging:merge",
    "methods": "methods",
    "pipeline": "inference.pipeline:pipeline",
    "predict": "inference.predict:predict",
    "pull": "store.sharing:pull",
    "push": "store.sharing:push",
    "random_backbone": "backbones.random:random_backbone",
    "register": "methods:register",
    "save_backbone": "backbones.load:save_backbone",
    "store": "store",
    "sweep": "train.search.sweep:sweep",
    "tasks": "tasks",
    "teach": "train.teach:teach",
    "train_only": "train.loop.trainable:train_only",
}

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> Sequence[str]:
    return sorted({*globals(), *_HOMES})
