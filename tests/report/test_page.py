"""The report: whole, escaped, bounded, and made by fit, sweep and eval."""

import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.html import Checker

import engram
from engram.cli.main import main
from engram.data.datasets import Dataset
from engram.data.source import Arrays
from engram.errors import EngramError
from engram.inference.attention import PARTS, attention
from engram.inference.evaluate import Answers, answers
from engram.model import MemoryViT
from engram.report.findings import MOST_CLASSES
from engram.report.page import MOST_IMAGES, TaskPart, answers_for_report, costs_of, write_report
from engram.tasks.costs import task_costs
from engram.tasks.regimes import REGIMES
from engram.tasks.shape import TrunkShape

HISTORY = [
    {"step": s, "loss": 2 / s, "val_loss": 3 / s, "val_accuracy": 1 - 1 / s} for s in (1, 5, 9)
]
BLOCKS = ("curves", "confusion", "classes", "mistakes", "looks", "reads")


def dataset(classes: Sequence[str], images: int, size: int = 32) -> Dataset:
    pixels = torch.randint(0, 256, (images, size, size, 3), dtype=torch.uint8)
    labels = np.arange(images) % len(classes)
    rows = Arrays(pixels, "noise")
    return Dataset("noise", "test", tuple(classes), labels, rows, np.arange(images))


def model_with(classes: Sequence[str], **settings: object) -> MemoryViT:
    model = MemoryViT(engram.random_trunk())
    model.add_task("t", classes, **settings)  # type: ignore[arg-type]
    return model.eval()


def page(path: Path, model: MemoryViT, said: Answers, **more: object) -> tuple[str, Checker]:
    write_report(path, model, [TaskPart(said, HISTORY)], title="A page", **more)  # type: ignore[arg-type]
    html = path.read_text(encoding="utf-8")
    return html, Checker(html)


def test_the_page_has_every_section_and_needs_nothing_else(tmp_path: Path) -> None:
    model = model_with(["a", "b", "c"])
    html, found = page(tmp_path / "r.html", model, answers(model, dataset("abc", 12), "t"))
    assert {f"{block}-t" for block in BLOCKS} | {"task-t", "regimes"} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)
    assert found.fetched == []
    assert "script" not in found.tags
    assert "url(" not in html
    assert "@import" not in html


def test_what_users_name_is_escaped(tmp_path: Path) -> None:
    nasty = ['<script>alert("1")</script>', "a & b", "'\"><img src=x onerror=alert(1)>"]
    model = model_with(nasty)
    said = answers(model, dataset(nasty, 12), "t")
    html, found = page(tmp_path / "r.html", model, said, lead="<b>bold</b>")
    assert "script" not in found.tags
    assert "b" in found.tags  # ours, in bars
    assert "<b>bold" not in html
    assert "onerror=alert(1)>" not in html
    assert "a &amp; b" in html


def test_names_that_are_no_utf8_are_shown_as_they_can_be(tmp_path: Path) -> None:
    model = model_with(["a", "b"])
    drinks = replace(dataset(["a", "b"], 8), name=os.fsdecode(b"caf\xe9"))
    html, _ = page(tmp_path / "r.html", model, answers(model, drinks, "t"))
    assert "caf\\udce9" in html


def test_many_classes_and_pictures_make_no_large_page(tmp_path: Path) -> None:
    classes = [f"class {i}" for i in range(300)]
    model = model_with(classes)
    data = dataset(classes, 1500, size=8)
    said = answers_for_report(model, data, "t")
    assert len(said.labels) == MOST_IMAGES
    assert len(set(said.labels.tolist())) > 250  # spread over all classes
    html, _ = page(tmp_path / "r.html", model, said)
    assert len(html) < 500_000
    assert f"Only the {MOST_CLASSES} of 300 classes" in html
    assert f"The {MOST_CLASSES} worst of" in html


def test_large_pictures_are_reduced(tmp_path: Path) -> None:
    trunk = engram.random_trunk(image_size=512, patch=64)
    model = MemoryViT(trunk)
    model.add_task("t", 2)
    html, _ = page(tmp_path / "r.html", model, answers(model, dataset("01", 4, 512), "t"))
    assert "image/jpeg" in html
    assert 'width="160"' in html
    assert len(html) < 400_000


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_has_a_page(tmp_path: Path, regime: str) -> None:
    model = model_with(["a", "b"], regime=regime)
    html, found = page(tmp_path / "r.html", model, answers(model, dataset("ab", 6), "t"))
    assert "reads-t" in found.ids
    assert f"class=chosen><td class=words>{regime}</td>" in html


def test_without_mistakes_the_page_says_so(tmp_path: Path) -> None:
    model = model_with(["a", "b"])
    said = answers(model, dataset("ab", 6), "t")
    perfect = torch.nn.functional.one_hot(said.labels, 2).float()
    said = Answers("t", said.dataset, perfect, said.labels, said.samples, ())
    html, _ = page(tmp_path / "r.html", model, said)
    assert "There are none." in html


def test_a_split_that_cannot_be_read_still_has_a_page(tmp_path: Path) -> None:
    model = model_with(["a", "b"])
    data = dataset("ab", 3)
    nothing = torch.zeros(0, dtype=torch.long)
    said = Answers("t", data, torch.zeros(0, 2), nothing, nothing, ["x.png", "y.png"])
    html, found = page(tmp_path / "r.html", model, said)
    assert "unreadable" in html
    assert "confusion-t" not in found.ids


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    model = model_with(["a", "b"])
    said = answers(model, dataset("ab", 2), "t")
    with pytest.raises(EngramError, match="cannot be written"):
        write_report(tmp_path / "none" / "r.html", model, [TaskPart(said)], title="x")


def test_costs_count_all_ancestors() -> None:
    model = MemoryViT(engram.random_trunk())
    model.add_task("a", 2)
    model.add_task("b", 2, extends=["a"])
    model.add_task("c", 2, extends=["b"])
    specs = {name: task.spec for name, task in model.tasks.items()}
    by_hand = task_costs(TrunkShape.of(model.trunk), specs["c"], [specs["a"], specs["b"]])
    assert costs_of(model)["c"] == by_hand


# Where a class token looks


@pytest.mark.parametrize("regime", REGIMES)
def test_shares_add_up_and_agree_with_the_patches(regime: str) -> None:
    seen = attention(model_with(["a", "b"], cells=4, regime=regime), "t", torch.rand(3, 3, 32, 32))
    assert seen.shares.sum(1) == pytest.approx(torch.ones(len(seen.shares)), abs=1e-5)
    assert seen.patches.sum((2, 3)).mean(0) == pytest.approx(seen.shares[:, 0], abs=1e-5)
    assert bool((seen.shares[:, PARTS.index("its cells")] > 0).all()) == REGIMES[regime].cells


def test_only_a_child_reads_what_it_extends() -> None:
    model = MemoryViT(engram.random_trunk())
    model.add_task("a", 2)
    model.add_task("b", 2, cells=0, extends=["a"])
    model.add_task("c", 2, cells=9)
    pixels = torch.rand(2, 3, 32, 32)
    extended = {name: attention(model, name, pixels).shares[:, 4] for name in model.tasks}
    assert float(extended["a"].max()) == float(extended["c"].max()) == 0
    assert float(extended["b"].min()) > 0


def test_looks_are_the_attention_of_the_first_layer_by_hand() -> None:
    model = model_with(["a", "b"], cells=3)
    task, trunk, pixels = model.task("t"), model.trunk, torch.rand(2, 3, 32, 32)
    assert task.class_token is not None
    assert task.cells is not None
    block, x = trunk.layers[0], trunk.embed(pixels)
    own = trunk.place(task.class_token).expand(2, -1, -1)
    tokens = torch.cat([x, own, task.cells[0].expand(2, -1, -1)], dim=1)
    q, k, _ = block.project(block.norm1(tokens))
    scores = q[:, :, x.shape[1] : x.shape[1] + 1] @ k.mT / q.shape[-1] ** 0.5
    weights = scores.softmax(-1).mean(1)[:, 0].detach()
    seen = attention(model, "t", pixels)
    assert torch.allclose(seen.patches[:, 0].flatten(1), weights[:, 1 : x.shape[1]], atol=1e-6)
    assert float(seen.shares[0, 3]) == pytest.approx(float(weights[:, -3:].sum(1).mean()), abs=1e-6)


UPDATES = [("memory", "propagate"), ("memory+adapter", "add")]


@pytest.mark.parametrize(("regime", "update"), [*((name, "fresh") for name in REGIMES), *UPDATES])
def test_looking_is_the_pass_that_answers(regime: str, update: str) -> None:
    model, pixels = model_with(["a", "b"], regime=regime, update=update), torch.rand(1, 3, 32, 32)
    task = model.task("t")
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(torch.randn_like(parameter))
    given: list[torch.Tensor] = []
    for block in (task.trunk or model.trunk).layers:
        block.qkv.register_forward_hook(lambda module, inputs, output: given.append(inputs[0]))
    with torch.inference_mode():
        model(pixels, tasks=["t"])
    answering, given[:] = given[:], []
    attention(model, "t", pixels)
    for one, other in zip(given, answering, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_class_token_that_learned_nothing_looks_as_the_trunks_own() -> None:
    pixels = torch.rand(2, 3, 32, 32)
    model = model_with(["a", "b"], regime="class")
    task, base = attention(model, "t", pixels), attention(model, "base", pixels)
    assert torch.allclose(task.patches, base.patches, atol=1e-6)


def test_without_a_class_token_nothing_looks() -> None:
    model = MemoryViT(engram.random_trunk(class_token=False, prefix_positions=0, classes=0))
    model.add_task("t", 2, regime="head")
    with pytest.raises(EngramError, match="no attention to show"):
        attention(model, "t", torch.rand(1, 3, 32, 32))


def test_looking_leaves_no_trace() -> None:
    model = model_with(["a", "b"])
    pixels = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        before = model(pixels)
        attention(model, "t", pixels)
        attention(model, "base", pixels)
        after = model(pixels)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_looking_is_blind_to_other_models_on_the_same_trunk() -> None:
    model, pixels = model_with(["a", "b"]), torch.rand(1, 3, 32, 32)
    alone = attention(model, "base", pixels)
    other, done = MemoryViT(model.trunk), threading.Event()
    other.add_task("other", 2)

    def run() -> None:  # another number of images, as when a task is tried before it is attached
        while not done.is_set():
            with torch.inference_mode():
                other(torch.rand(3, 3, 32, 32))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(100):
            seen = attention(model, "base", pixels)
            assert torch.allclose(seen.patches, alone.patches, atol=1e-6)
    finally:
        done.set()
        thread.join()


# The commands


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small trunk and small data, in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path / "cache"))
    engram.save_trunk(engram.random_trunk(), tmp_path / "trunk")
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{split}": values
        for split in ("train", "test")
        for kind, values in (
            ("x", rng.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)),
            ("y", np.arange(24) % 3),
        )
    }
    np.savez(tmp_path / "data.npz", **arrays)
    return tmp_path


def ids(path: Path) -> set[str]:
    return set(re.findall(r'id="([^"]+)"', path.read_text(encoding="utf-8")))


def test_fit_writes_a_report_beside_the_engram(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "fit data.npz --task t --backbone trunk --epochs 2 --workers 0 --test --json"
    assert main([*command.split(), "-o", "t.safetensors"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["report"] == str(Path("t.run") / "report.html")
    assert {f"{block}-t" for block in BLOCKS} <= ids(place / "t.run" / "report.html")


def test_sweep_writes_its_settings_into_the_report(place: Path) -> None:
    command = "sweep data.npz --task t --backbone trunk --epochs 1 --workers 0 --lr 0.001,0.01"
    assert main([*command.split(), "--seeds", "2", "-o", "t.safetensors"]) == 0
    assert {"settings-t", "curves-t", "looks-t"} <= ids(place / "t.run" / "report.html")


def test_eval_writes_a_report_where_it_is_told(place: Path) -> None:
    command = "fit data.npz --task t --backbone trunk --epochs 1 --workers 0 -o t.safetensors"
    assert main(command.split()) == 0
    command = "eval t.safetensors --data data.npz --backbone trunk --workers 0 --report page.html"
    assert main(command.split()) == 0
    assert {"task-t", "confusion-t", "mistakes-t", "regimes"} <= ids(place / "page.html")
    assert "curves-t" not in ids(place / "page.html")


def test_a_report_that_fails_costs_no_engram(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise EngramError("The disk is full.")

    monkeypatch.setattr("engram.report.run.write_report", full)
    command = "fit data.npz --task t --backbone trunk --epochs 1 --workers 0 -o t.safetensors"
    assert main(command.split()) == 0
    assert "not written: The disk is full." in capsys.readouterr().out
    assert (place / "t.safetensors").exists()
