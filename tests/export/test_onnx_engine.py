"""The service's ONNX engine answers as the model does, and takes tasks without an export."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.exports import EVERYTHING, largest, new_model
from tests.support.strategies import scatter

from engram import MemoryViT
from engram.errors import Notice
from engram.export import onnx_engine
from engram.export.onnx_engine import OnnxEngine
from engram.export.runtime import RUNTIMES, half_precision
from engram.export.verify import generated_pixels
from engram.util.settings import ComputeSettings, setting_of


@pytest.fixture(scope="module")
def model() -> MemoryViT:
    """Tasks of every kind that share a pass."""
    model = new_model(**EVERYTHING)
    model.add_task("masks", 3, 2, kind="segmentation", seed=3)
    scatter(model.task("masks"), by=0.3, seed=3)
    return model


@pytest.fixture(scope="module", params=["onnx-int8", "openvino", "openvino-int8"])
def rounding(model: MemoryViT, request: pytest.FixtureRequest) -> OnnxEngine:
    """An engine in int8, or in bf16."""
    runtime = RUNTIMES[request.param]
    pytest.importorskip(runtime.library)
    return OnnxEngine(model, runtime)


def without(model: MemoryViT, *names: str) -> MemoryViT:
    other = MemoryViT(model.backbone).eval()
    for name in model.tasks:
        if name not in names:
            other.attach(model.engram(name))
    return other


def check(found: OnnxEngine, names: Sequence[str]) -> None:
    pixels = generated_pixels(found.model.preprocessing, 3, seed=5)
    with torch.inference_mode():
        assert largest(found.run(pixels, names), found.model(pixels, names)) < 1e-4


@pytest.mark.parametrize("kind", ["onnx", "openvino-fp32"])
def test_tasks_come_and_go_without_an_export(
    kind: str, model: MemoryViT, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = RUNTIMES[kind]
    pytest.importorskip(runtime.library)
    made, make = list[str](), onnx_engine.backbone_proto

    def counted(*given: Any) -> Any:
        made.append("graph")
        return make(*given)

    monkeypatch.setattr(onnx_engine, "backbone_proto", counted)
    few = without(model, "masks", "child.of-plain", "both", "child.of-thin", "layers")
    first = OnnxEngine(few, runtime)
    assert made == ["graph"]
    full = OnnxEngine(model, runtime, before=first)
    check(full, ["base", *model.tasks])
    check(full, ["child.of-thin", "masks"])
    again = OnnxEngine(few, runtime, before=full)
    check(again, ["base", "plain"])
    nothing = without(model, *model.tasks)
    check(OnnxEngine(nothing, runtime, before=again), ["base"])
    check(first, ["base", *few.tasks])  # a request that began before finishes with it
    assert made == ["graph"]


def test_answers_are_bit_for_bit_the_same_whatever_shares_the_pass(rounding: OnnxEngine) -> None:
    """For every kind of task, alone and in any place of batches of several sizes."""
    names = rounding.names
    pixels = generated_pixels(rounding.model.preprocessing, 9, seed=5)
    pixels[3] *= 40  # a neighbour that would change the scale of a batch
    together = rounding.run(pixels, names)
    for i in range(9):
        alone = rounding.run(pixels[i : i + 1], names)
        for name in names:
            assert torch.equal(alone[name][0], together[name][i]), name
    order = torch.tensor([4, 0, 8, 2, 7])
    some = rounding.run(pixels[order], ["thin", "plain", "base"])
    assert list(some) == ["thin", "plain", "base"]
    for name, found in some.items():
        assert torch.equal(found, together[name][order]), name


def test_rounding_stays_near_the_model(rounding: OnnxEngine) -> None:
    pixels = generated_pixels(rounding.model.preprocessing, 20, seed=6)
    with torch.inference_mode():
        expected = rounding.model(pixels, rounding.names)
    for name, found in rounding.run(pixels, rounding.names).items():
        error = float((found - expected[name]).norm() / expected[name].norm())
        assert 0 < error < (0.15 if rounding.runtime.precision == "int8" else 0.03), (name, error)


@pytest.mark.parametrize("kind", ["onnx", "openvino-fp32"])
def test_scores_are_those_of_the_model(kind: str, model: MemoryViT) -> None:
    pytest.importorskip(RUNTIMES[kind].library)
    # With adapters, as the other engines: another graph would be traced without them.
    known = without(model, *(name for name in model.tasks if name not in ("plain", "adapted")))
    statistics = known.task("plain").keep_statistics()
    for one in (statistics.means, statistics.centre):
        torch.nn.init.normal_(one)
    statistics.deviation.fill_(2)
    statistics.counts.fill_(5)
    statistics.quantiles.copy_(torch.tensor([-2.0, -1.0]))
    pixels = generated_pixels(model.preprocessing, 3, seed=5)
    found = OnnxEngine(known, RUNTIMES[kind]).run(pixels, ["base", "plain"], familiarity=True)
    with torch.inference_mode():
        _, expected = known.with_familiarity(pixels, ["base", "plain"])
    assert list(found) == ["base", "plain", "plain:familiarity"]
    assert torch.allclose(found["plain:familiarity"], expected["plain"], atol=1e-3)


@pytest.mark.parametrize("broken", ["no bf16", "trap"])
def test_a_cpu_that_cannot_compute_in_bf16_computes_in_fp32_and_says_so(
    broken: str, model: MemoryViT, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino")
    if broken == "no bf16":
        core = SimpleNamespace(get_property=lambda *_: ["FP32", "INT8"])
        monkeypatch.setattr(openvino, "Core", lambda: core)
    else:
        ended = subprocess.CompletedProcess([], -signal.SIGILL)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    half_precision.cache_clear()
    try:
        with pytest.warns(Notice, match="fp32"):
            assert half_precision() == "f32"
    finally:
        half_precision.cache_clear()


def test_every_engine_has_a_name_that_settings_allow() -> None:
    engine = setting_of(ComputeSettings, "engine")
    assert {"torch", *RUNTIMES} == {*engine.metadata["choices"]}
