"""A model as one file for other programs: ONNX or torch.export, verified before it is kept.

Start in `write.py`. `quantise.py` converts linear layers to int8, `verify.py` compares the result
with the model, `runtime.py` runs exported files, and `standalone.py` is the `predict.py` next to
them. `onnx_engine.py` is what the service runs: a graph of the backbone alone, to which tasks are
attached without another export.
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.export.runtime import OnnxModel
    from engram.export.write import Export, export_onnx, export_torch

__all__ = ["Export", "OnnxModel", "export_onnx", "export_torch"]
__getattr__ = lazy_names(
    __name__,
    {
        "Export": "write:Export",
        "OnnxModel": "runtime:OnnxModel",
        "export_onnx": "write:export_onnx",
        "export_torch": "write:export_torch",
    },
)
