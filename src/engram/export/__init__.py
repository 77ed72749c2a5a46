"""A model as one file for other programs: ONNX or torch.export, checked before it is kept.

The service and the command line import it; training does not know of it. Start in `write.py`.
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.export.runtime import OnnxModel
    from engram.export.write import export_onnx, export_torch

__all__ = ["OnnxModel", "export_onnx", "export_torch"]
__getattr__ = lazy_names(
    __name__,
    {
        "OnnxModel": "runtime:OnnxModel",
        "export_onnx": "write:export_onnx",
        "export_torch": "write:export_torch",
    },
)
