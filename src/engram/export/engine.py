"""The engine of the service in onnxruntime: the trunk's graph, which stays, and tasks that change.

Masked tasks are inputs of the trunk's graph; side patches, readouts and heads read what it gives,
in torch. So a task is attached without an export.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engram.export.runtime import require_onnx
from engram.export.trunk_graph import TrunkGraph
from engram.export.verify import check_differences, compare, expected_logits
from engram.export.write import check_exportable, check_onnx_size
from engram.inference.engine import Engine, OneByOne
from engram.memory import Memory, MemoryTensors
from engram.model import MemoryViT
from engram.sights import Pass


class OnnxEngine:
    """A model that does not change any more, with its trunk in onnxruntime.

    It is compared with the model before it is used. With int8, an answer is bit for bit the same
    whatever other images and tasks are asked for in the same pass.

    Args:
        model: The model, in float32 on the CPU, with no task that changes the trunk's tokens.
        int8: Quantise the linear layers to int8: faster, less exact.
        threads: CPU threads. By default as many as torch uses.
        before: Another engine; if it has a graph for the same trunk, that is used again.

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
        parts = {name: model.task(name).spec.parts for name in model.tasks}
        masked = [name for name, has in parts.items() if has.masked]
        pixels, expected = expected_logits(model, self.names)
        old = before if isinstance(before, OnnxEngine) and before.int8 == int8 else None
        adapters = any(parts[name].adapters for name in masked)
        if old is not None and old.graph.fits(model.trunk, adapters):
            graph = old.graph
        else:
            graph = TrunkGraph(model.trunk, pixels, adapters=adapters, int8=int8, threads=threads)
        self.graph: TrunkGraph = graph
        self.memory: Memory | None = None
        self.inputs: MemoryTensors | None = None
        if masked:
            with torch.no_grad():
                self.memory = model.memory(masked)
                self.inputs = self.memory.tensors(model.trunk, self.graph.adapters)
        self.reads_layers = any(has.side or has.moments for has in parts.values())
        found = compare(partial(self.run, tasks=self.names), pixels, expected)
        check_differences(found, int8, "it is not used")

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        # With RMSNorm, last bits of the graph's tokens were seen to depend on the batch.
        if self.int8 and len(pixels) > 1 and self.model.trunk.config.norm == "rms":
            return OneByOne(self).run(pixels, tasks)
        raw, tokens, layers = self.graph.run(pixels, self.inputs, self.reads_layers)
        passed = Pass(raw, self.memory.split(tokens) if self.memory else {}, layers)
        size = (pixels.shape[-2], pixels.shape[-1])
        with torch.inference_mode():
            if not self.int8:
                return self.model.from_pass(passed, tasks, size)
            # A product of one row is computed in another order than one of several: last bits
            # would depend on how many images there are, and on which tasks stand side by side.
            images = [passed.image(i) for i in range(len(pixels))]
            parts = [self.model.from_pass(image, self.names, size) for image in images]
        return {name: torch.cat([part[name] for part in parts]) for name in tasks}
