"""The engine of the service in onnxruntime: the backbone's graph, which stays, and tasks that
change.

Class tokens of tasks are inputs of the backbone's graph; everything else reads what it gives, in
torch. So a task is attached without an export.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engram.export.backbone_graph import BackboneGraph
from engram.export.runtime import require_onnx
from engram.export.verify import check_differences, compare, expected_logits
from engram.export.write import check_exportable, check_onnx_size
from engram.inference.engine import Engine, OneByOne
from engram.methods.masked import JoinedMemory
from engram.methods.memory import Memory, MemoryTensors
from engram.methods.method import Needs
from engram.model import MemoryViT


class OnnxEngine:
    """A model that does not change any more, with its backbone in onnxruntime.

    It is compared with the model before it is used. With int8, an answer is bit for bit the same
    whatever other images and tasks are asked for in the same pass.

    Args:
        model: The model, in float32 on the CPU, with no task that changes the backbone's tokens.
        int8: Quantise the linear layers to int8: faster, less exact.
        threads: CPU threads. By default as many as torch uses.
        before: Another engine; if it has a graph for the same backbone, that is used again.

    Raises:
        EngramError: The model cannot be exported, or the answers differ from the model's.
    """

    def __init__(
        self,
        model: MemoryViT,
        *,
        int8: bool = False,
        threads: int | None = None,
        before: Engine | None = None,
    ) -> None:
        require_onnx()
        check_onnx_size(model)
        self.model, self.int8, self.names = model, int8, check_exportable(model)
        methods = {name: task.method for name, task in model.tasks.items()}
        pixels, expected = expected_logits(model, self.names)
        streams = [name for name, method in methods.items() if method.streams]
        self.memory: Memory | None = None
        if streams:
            with torch.no_grad():
                joined = model.join(streams)
            assert isinstance(joined, JoinedMemory)
            self.memory = joined.memory
        adapters = self.memory is not None and self.memory.bank is not None
        old = before if isinstance(before, OnnxEngine) and before.int8 == int8 else None
        if old is not None and old.graph.fits(model.backbone, adapters):
            graph = old.graph
        else:
            graph = BackboneGraph(
                model.backbone, pixels, adapters=adapters, int8=int8, threads=threads
            )
        self.graph: BackboneGraph = graph
        self.inputs: MemoryTensors | None = None
        if self.memory is not None:
            with torch.no_grad():
                self.inputs = self.memory.tensors(model.backbone, self.graph.adapters)
        self.reads_layers = any(
            method.needs & (Needs.LAYERS | Needs.STATISTICS) and not method.streams
            for method in methods.values()
        )
        found = compare(partial(self.run, tasks=self.names), pixels, expected)
        check_differences(found, int8, "it is not used")

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        # With RMSNorm, last bits of the graph's tokens were seen to depend on the batch.
        if self.int8 and len(pixels) > 1 and self.model.backbone.config.norm == "rms":
            return OneByOne(self).run(pixels, tasks)
        raw, tokens, layers = self.graph.run(pixels, self.inputs, self.reads_layers)
        streams = self.memory.split(tokens) if self.memory else {}
        size = (pixels.shape[-2], pixels.shape[-1])
        with torch.inference_mode():
            if not self.int8:
                return self.model.from_pass(tasks, size, raw, streams, layers)
            # A product of one row is computed in another order than one of several: last bits
            # would depend on how many images there are, and on which tasks stand side by side.
            parts = []
            for i in range(len(pixels)):
                own = {name: one[i : i + 1] for name, one in streams.items()}
                normed = [one[i : i + 1] for one in layers]
                parts.append(self.model.from_pass(self.names, size, raw[i : i + 1], own, normed))
        return {name: torch.cat([part[name] for part in parts]) for name in tasks}
