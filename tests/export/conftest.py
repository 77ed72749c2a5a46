"""One model, exported in every format: an export takes seconds, so all tests share it."""

from __future__ import annotations

import pytest
from tests.support.exports import Made, new_model, trace_once

from engram.export import export_onnx, export_torch


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, model = tmp_path_factory.mktemp("export"), new_model()
    with pytest.MonkeyPatch.context() as patch:
        trace_once(patch)
        program = export_torch(model, folder / "model.pt2")
        float32 = export_onnx(model, folder / "model.onnx")
        int8 = export_onnx(model, folder / "small" / "int8.onnx", int8=True)
    return Made(model, float32, int8, program)
