"""The card of a repository tells others what they need to know."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.repocard import metadata_load

from engram import MemoryViT, merge, random_backbone
from engram.methods import METHODS
from engram.store.format import read_engram, write_engram
from engram.store.sharing import push


def test_the_card_tells_what_others_need(folder: Path) -> None:
    planned = push(
        ["flowers.safetensors", "roses.safetensors"], "ann/garden", dry_run=True,
        license="apache-2.0", backbone="google/vit-base-patch32-224-in21k",
    )  # fmt: skip
    (folder / "README.md").write_text(planned.card)
    front = metadata_load(folder / "README.md")
    assert front is not None
    assert front["library_name"] == "engram"
    assert front["license"] == "apache-2.0"
    assert front["base_model"] == "google/vit-base-patch32-224-in21k"
    assert front["base_model_relation"] == "adapter"
    assert front["pipeline_tag"] == "image-classification"
    assert front["metrics"] == ["accuracy", "f1"]
    fingerprint = planned.engrams[0].backbone.fingerprint
    assert {"engram", "learnable-memory", f"engram-backbone-{fingerprint[:12]}"} <= {*front["tags"]}
    measured = front["model-index"][0]["results"][0]
    assert measured["metrics"][0] == {"type": "accuracy", "value": 0.9}
    assert [e["content"] for e in front["engrams"]] == [e.content for e in planned.engrams]
    for expected in (
        "| flowers | classification | 2 classes (rose, tulip) | masked, cells per layer 3 |",
        "extends flowers",
        fingerprint,
        "data photos",
        "- test: accuracy 90.00%",
        "lr 0.01",
        'load_model("hf:ann/garden")',
        f"hf:ann/garden/flowers.safetensors#{planned.engrams[0].content[:12]}",
        planned.engrams[1].content,
    ):
        assert expected in planned.card


def test_a_card_names_the_engrams_of_an_average(folder: Path) -> None:
    again = replace(read_engram("flowers.safetensors"), preprocessing=None)
    tensors = {name: tensor + 1 for name, tensor in again.tensors.items()}
    sources = [replace(again, tensors=given) for given in (again.tensors, tensors)]
    for i, source in enumerate(sources):
        write_engram(f"{i}.safetensors", source)
    merge(["0.safetensors", "1.safetensors"], "both.safetensors", task="both")
    card = push("both.safetensors", "ann/both", dry_run=True).card
    for one in sources:
        assert f"- merged from: flowers, content {one.content}, weight 0.5" in card


def test_a_card_survives_odd_names(folder: Path) -> None:
    model = MemoryViT(random_backbone())
    odd = ["a|b", "<script>", "`x`", "---", "#", "ü\u202e", "tab\there"]
    model.add_task("odd", classes=odd)
    model.save("odd", "odd.safetensors", recipe={"note": "a: b\n---\n- c"})
    planned = push("odd.safetensors", "ann/odd", dry_run=True)
    (folder / "README.md").write_text(planned.card)
    front = metadata_load(folder / "README.md")
    assert front is not None
    assert front["engrams"][0]["task"] == "odd"
    assert "<script>" not in planned.card
    row = next(line for line in planned.card.splitlines() if line.startswith("| odd"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 6  # five columns


def test_a_card_takes_numbers_of_any_size(folder: Path) -> None:
    metrics = {"test": {"accuracy": 0.91, "pixels": 2**64 - 1, "other": -(10**12)}}
    write_engram("big.safetensors", replace(read_engram("roses.safetensors"), metrics=metrics))
    card = push("big.safetensors", "ann/roses", dry_run=True).card
    assert "accuracy 91.00%" in card
    assert "1.845e+19" in card
    assert "-1e+12" in card


def test_a_card_shows_only_the_first_of_very_many_metrics(folder: Path) -> None:
    many = {f"m{i}": 0.5 for i in range(20_000)}
    metrics = {"test": many, **{f"split{i}": {"accuracy": 0.5} for i in range(20_000)}}
    engram = replace(read_engram("roses.safetensors"), metrics=metrics, recipe=many)
    write_engram("many.safetensors", engram)
    started = time.process_time()  # of this process alone: the machine may be busy
    card = push("many.safetensors", "ann/roses", dry_run=True).card
    assert time.process_time() - started < 3
    assert "m99 0.5" in card
    assert "m100 " not in card
    assert len(card) < 100_000


@pytest.mark.parametrize("regime", [name for name in METHODS if "masked" not in name])
def test_the_card_of_other_regimes_says_what_they_are(regime: str, folder: Path) -> None:
    model = MemoryViT(random_backbone(width=16, heads=2, depth=1))
    if METHODS[regime].one_class:
        model.add_task("t", classes=1, regime=regime, kind="anomaly")
    else:
        model.add_task("t", classes=2, regime=regime)
    model.save("t", "t.safetensors")
    card = push("t.safetensors", "ann/t", dry_run=True).card
    assert ("own copy of the ViT is in the file" in card) == (regime == "full")
    assert ("pass of its own" in card) == (not METHODS[regime].shares_pass)
    assert METHODS[regime].about in card
    assert ("can run in the same pass" in card) == METHODS[regime].shares_pass


@pytest.mark.parametrize(
    ("kind", "pipeline"),
    [
        ("classification", "image-classification"),
        ("multilabel", "image-classification"),
        ("regression", None),
        ("segmentation", "image-segmentation"),
    ],
)
def test_every_kind_of_task_has_a_card(kind: str, pipeline: str | None, folder: Path) -> None:
    model = MemoryViT(random_backbone(width=16, heads=2, depth=1))
    model.add_task("t", classes=["one", "two"], kind=kind)
    model.save("t", "t.safetensors", metrics={"test": {"score": 0.5}})
    planned = push("t.safetensors", "ann/t", dry_run=True)
    (folder / "README.md").write_text(planned.card)
    front = metadata_load(folder / "README.md")
    assert front is not None
    assert front.get("pipeline_tag") == pipeline
    assert kind in front["tags"]
    (folder / "sent.safetensors").write_bytes(planned.files["t.safetensors"])
    assert read_engram("sent.safetensors").content == read_engram("t.safetensors").content


def test_a_child_alone_names_its_parents(folder: Path) -> None:
    planned = push("roses.safetensors", "ann/roses", dry_run=True)
    assert "bundle.json" not in planned.files
    assert "`roses` extends `flowers`" in planned.card
    assert read_engram("flowers.safetensors").content[:12] in planned.card
    assert "$ engram predict its-parents.safetensors hf:ann/roses image.jpg" in planned.card
