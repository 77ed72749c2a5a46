"""Other ways to do the same work, for comparison: each uses its library as it is meant to be used.

    straightforward   Table 1 in the most direct code: one sequence with an additive mask, the
                      memory expanded to every image and projected there
    vit-pytorch       `Adapter` of its learnable-memory ViT, one for each task on one ViT
    lora              PEFT's LoRA (rank 8 on queries and values) on transformers' ViT with SDPA, an
                      adapter for each task, switched between passes

The last two answer one task per pass. Weights are random: time does not depend on them.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import EngramError
from engram.experiments.bench import Cases, Peer, Step, Workload, make_step, peer_step
from engram.experiments.timing import Case
from engram.methods import Masked
from engram.model import MemoryViT
from engram.vit import ViT
from engram.vit.layers import merge_heads, split_heads

RANK = 8


class Straightforward(nn.Module):
    """The masked tasks of a `MemoryViT` (one class token each, none extending another).

    It computes the same logits as the model, whose weights it shares.
    """

    def __init__(self, model: MemoryViT) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.tasks: Mapping[str, Any] = dict(model.tasks)
        self.parameters_of_tasks = nn.ModuleList(self.tasks.values())
        n = (
            self.backbone.config.prefix
            + self.backbone.config.grid[0] * self.backbone.config.grid[1]
        )
        self.mask = self._table_1(n).to(self.backbone.patch.weight)

    def _table_1(self, n: int) -> Tensor:
        """0 where a token may read, -inf elsewhere: (n + s, n + s + all cells)."""
        specs = [task.spec for task in self.tasks.values()]
        plain = [type(s.method) is Masked and s.method.tokens == 1 and not s.extends for s in specs]
        if not all(plain):
            raise EngramError("Only masked tasks with one class token and no parents are compared.")
        if self.backbone.config.rotary is not None:
            raise EngramError("Backbones with rotary positions are not compared.")
        cells = [spec.method.settings()["cells"] for spec in specs]
        s, m = len(specs), sum(cells)
        allowed = torch.zeros(n + s, n + s + m, dtype=torch.bool)
        allowed[:, :n] = True
        first = n + s
        for i, count in enumerate(cells):
            allowed[n + i, n + i] = True
            allowed[n + i, first : first + count] = True
            first += count
        return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        backbone, tasks = self.backbone, self.tasks.values()
        x = backbone.embed(pixels)
        b, n, width = x.shape
        own = backbone.place(torch.cat([task.class_token for task in tasks]))
        x = torch.cat([x, own.expand(b, -1, -1)], dim=1)
        memory = torch.cat([task.cells for task in tasks], dim=1)  # (l, all cells, D)
        for layer, block in enumerate(backbone.layers):
            normed = block.norm1(torch.cat([x, memory[layer].expand(b, -1, -1)], dim=1))
            bias = None if block.qkv.bias is None else block.qkv.bias[:width]
            q = F.linear(normed[:, : x.shape[1]], block.qkv.weight[:width], bias)
            k, v = block.keys_values(normed)
            read = F.scaled_dot_product_attention(
                split_heads(q, block.heads), k, v, attn_mask=self.mask
            )
            read = block.add_up(merge_heads(read))
            x = x + (read if block.scale1 is None else read * block.scale1)
            update = block.mlp(block.norm2(x))
            x = x + (update if block.scale2 is None else update * block.scale2)
        tokens = backbone.norm(x)
        logits = {} if backbone.head is None else {"base": backbone.head(x[:, :n], tokens[:, :n])}
        for i, (name, task) in enumerate(self.tasks.items()):
            logits[name] = task.head(tokens[:, n + i])
        return logits


# One task per pass


class VitPytorch:
    """vit-pytorch's learnable-memory ViT, in the backbone's shape."""

    def __init__(self, backbone: ViT, tasks: int, classes: int, cells: int) -> None:
        library, config = _vit_pytorch(), backbone.config
        self.vit = library.ViT(
            image_size=config.image_size, patch_size=config.patch, num_classes=classes,
            dim=config.width, depth=config.depth, heads=config.heads,
            dim_head=config.width // config.heads, mlp_dim=config.mlp_width,
        ).to(backbone.device)  # fmt: skip
        self.adapters = [
            library.Adapter(vit=self.vit, num_memories_per_layer=cells, num_classes=classes)
            .to(backbone.device)
            .eval()
            for _ in range(tasks)
        ]
        self._next = cycle(self.adapters)

    def one_pass(self, pixels: Tensor) -> Tensor:
        logits: Tensor = next(self._next)(pixels)
        return logits

    def trained(self) -> Iterator[nn.Parameter]:
        return (p for p in self.adapters[0].parameters() if p.requires_grad)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of one task; `state_dict` of an `Adapter` would hold the ViT as well."""
        named = self.adapters[0].named_parameters()
        return {name: p.detach() for name, p in named if not name.startswith("vit.")}


def transformers_vit(backbone: ViT, classes: int) -> Any:
    """transformers' ViT in the backbone's shape, with SDPA."""
    transformers: Any = importlib.import_module("transformers")
    config = backbone.config
    settings = transformers.ViTConfig(
        image_size=config.image_size, patch_size=config.patch, hidden_size=config.width,
        num_hidden_layers=config.depth, num_attention_heads=config.heads,
        intermediate_size=config.mlp_width, num_labels=classes, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.ViTForImageClassification(settings).to(backbone.device).eval()


class Lora:
    """PEFT's LoRA on transformers' ViT, with a classifier for each adapter."""

    def __init__(self, backbone: ViT, tasks: int, classes: int) -> None:
        peft: Any = importlib.import_module("peft")
        lora = peft.LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["classifier"],
            init_lora_weights=False,  # random, so that adapters differ
        )
        base = transformers_vit(backbone, classes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names
            self.model = peft.get_peft_model(base, lora, adapter_name="task0")
            for i in range(1, tasks):
                self.model.add_adapter(f"task{i}", lora)
        self.model.set_adapter("task0")
        self.model.to(backbone.device).eval()
        self._next = cycle(range(tasks)) if tasks > 1 else None

    def one_pass(self, pixels: Tensor) -> Tensor:
        if self._next is not None:
            self.model.set_adapter(f"task{next(self._next)}")
        logits: Tensor = self.model(pixels).logits
        return logits

    def trained(self) -> Iterator[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)

    def save(self, folder: Path) -> Path:
        """Write the file of one task with PEFT, and return its path."""
        self.model.save_pretrained(folder, selected_adapters=["task0"])
        return next(folder.rglob("adapter_model.safetensors"))


def installed(backbone: ViT) -> list[str]:
    """The libraries that are installed and support the shape of this backbone."""
    plain = backbone.config.class_token and not backbone.config.registers
    if not plain or backbone.config.activation != "gelu":
        return []
    needs = {"vit-pytorch": ("vit_pytorch", "einops"), "lora": ("peft", "transformers")}
    return [name for name, packages in needs.items() if all(map(find_spec, packages))]


def _vit_pytorch() -> ModuleType:
    """Import the one file that is needed: the package imports torchvision, which may fail."""
    name = "vit_pytorch.learnable_memory_vit"
    if name in sys.modules:
        return sys.modules[name]
    package = find_spec("vit_pytorch")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / "learnable_memory_vit.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


# What they add to the tables of `engram bench`


def forward_cases(workload: Workload, tasks: Sequence[int]) -> Callable[[Tensor], Cases]:
    """The cases of all peers for a batch of images, by name and number of tasks."""
    backbone, there = workload.backbone, installed(workload.backbone)
    naive = {count: Straightforward(workload.model(count)) for count in tasks}
    peers: dict[tuple[str, int], Peer] = {}
    plain = transformers_vit(backbone, 1000) if "lora" in there else None
    if "vit-pytorch" in there:
        shared = VitPytorch(backbone, max(tasks), workload.classes, workload.cells)
        peers |= {("vit-pytorch", count): shared for count in tasks}
    if "lora" in there:  # switching takes longer the more adapters there are
        peers |= {("PEFT LoRA", n): Lora(backbone, n, workload.classes) for n in tasks}

    def cases(pixels: Tensor) -> Cases:
        found: Cases = {}
        if plain is not None:
            found["transformers, plain", 0] = Case(partial(plain, pixels))
        for count in tasks:
            found["straightforward", count] = Case(partial(naive[count], pixels))
        for (what, count), peer in peers.items():
            passes = min(count, workload.passes)
            found[what, count] = Case(partial(peer.one_pass, pixels), passes, count)
        return found

    return cases


def training_steps(workload: Workload, batch: int) -> dict[str, Callable[[], Step]]:
    """Functions that build a training step of one task, by the name of the peer."""
    backbone, classes, cells = workload.backbone, workload.classes, workload.cells
    steps: dict[str, Callable[[], Step]] = {
        "straightforward, backbone frozen": partial(_straightforward_step, workload, batch, False),
        "straightforward, all gradients": partial(_straightforward_step, workload, batch, True),
    }
    available = installed(backbone)
    if "vit-pytorch" in available:
        steps["vit-pytorch"] = lambda: peer_step(
            workload, batch, VitPytorch(backbone, 1, classes, cells)
        )
    if "lora" in available:
        steps["PEFT LoRA"] = lambda: peer_step(workload, batch, Lora(backbone, 1, classes))
    return steps


def _straightforward_step(workload: Workload, batch: int, all_gradients: bool) -> Step:
    own = Workload(copy.deepcopy(workload.backbone), workload.cells, workload.classes)
    model = own.model(1)
    naive, pixels = Straightforward(model), workload.pixels(batch)
    own.backbone.requires_grad_(all_gradients)

    def logits() -> Iterable[Tensor]:
        own.backbone.zero_grad()
        return [naive(pixels)["task0"]]

    return make_step(logits, [model.task("task0").parameters()], workload.labels(batch))
