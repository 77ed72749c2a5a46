"""A model as one file for other programs: ONNX or torch.export, verified before it is kept.

Start in `write.py`. `quantise.py` converts linear layers to int8, `verify.py` compares the result
with the model, `runtime.py` runs exported files, and `standalone.py` is the `predict.py` next to
them. `onnx_engine.py` is what the service runs: a graph of the backbone alone, to which tasks are
attached without another export. `web.py` writes a page that runs all tasks in a browser, from the
files in `page/`.
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.export.runtime import OnnxModel
    from engram.export.web import WebExport, export_web
    from engram.export.write import Export, export_onnx, export_torch

__all__ = ["Export", "OnnxModel", "WebExport", "export_onnx", "export_torch", "export_web"]
__getattr__ = lazy_names(
    __name__,
    {
        "Export": "write:Export",
        "OnnxModel": "runtime:OnnxModel",
        "WebExport": "web:WebExport",
        "export_onnx": "write:export_onnx",
        "export_torch": "write:export_torch",
        "export_web": "web:export_web",
    },
)
