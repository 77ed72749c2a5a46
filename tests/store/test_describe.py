"""What the command line says of engrams, bundles and backbones: a document and rows that agree."""

import json
from pathlib import Path

import pytest
from tests.support.engrams import randomised

from engram import EngramError, MemoryViT, ViT, compose, push, save_backbone
from engram.methods import METHODS
from engram.store.describe import describe, describe_engrams, describe_list, describe_push
from engram.store.format import read_engram
from engram.store.remote import list_engrams


def test_an_engram_is_described_without_its_backbone(path: Path) -> None:
    engram = read_engram(path)
    found = describe(path)
    document = json.loads(json.dumps(found.document))
    assert document["what"] == "engram"
    assert (document["content"], document["bytes"]) == (engram.content, path.stat().st_size)
    assert document["task"]["classes"] == ["rose", "tulip", "é"]
    rows = dict(found.rows)
    assert rows["classes"] == "3 classes (rose, tulip, é)"
    assert rows["regime"].startswith("masked, cells per layer 3")
    assert rows["preprocessing"].startswith("16 x 16, squashed")
    assert rows["metrics"] == "accuracy 50.00%"


def test_a_bundle_has_a_row_for_each_engram(backbone: ViT, path: Path, tmp_path: Path) -> None:
    model = MemoryViT(backbone)
    model.attach(path)
    randomised(model.add_task("b", classes=2, extends=["a"]))
    child = model.save("b", tmp_path / "b.safetensors")
    found = describe(compose([child, path], tmp_path / "both").folder)
    assert [row[0] for row in found.table] == ["a", "b"]
    assert [row[found.columns.index("extends")] for row in found.table] == ["-", "a"]
    assert [entry["extends"] for entry in found.document["engrams"]] == [[], ["a"]]
    assert dict(found.rows)["tasks"] == "2"


def test_side_tasks_and_readouts_are_described_with_their_sizes(
    backbone: ViT, tmp_path: Path
) -> None:
    model = MemoryViT(backbone)
    model.add_task("a", classes=2, cells=3, regime="side", rank=4)
    model.add_task("b", classes=2, regime="readout")
    model.add_task("c", classes=2, cells=2, regime="side", rank=4, extends=["a"])
    paths = [model.save(name, tmp_path / f"{name}.safetensors") for name in model.tasks]
    layers = backbone.config.depth + 1
    regimes = [dict(describe(path).rows)["regime"] for path in paths]
    side, readout = (f"({METHODS[name].about})" for name in ("side", "readout"))
    assert regimes == [
        f"side, cells per layer 3, rank of its side network 4 {side}",
        f"readout, layers its head sees {layers} {readout}",
        f"side, cells per layer 2, rank of its side network 4, extends a {side}",
    ]
    task = describe(paths[0]).document["task"]
    assert (task["rank"], "layers" in task) == (4, False)
    found = describe(compose(paths, tmp_path / "all").folder)
    sizes = [(e.get("rank"), e.get("layers")) for e in found.document["engrams"]]
    assert dict(zip((row[0] for row in found.table), sizes, strict=True)) == {
        "a": (4, None),
        "b": (None, layers),
        "c": (4, None),
    }


def test_a_backbone_is_described_with_what_it_costs(backbone: ViT, tmp_path: Path) -> None:
    found = describe(save_backbone(backbone, tmp_path / "vit"))
    assert found.document["what"] == "backbone"
    assert found.document["fingerprint"] == backbone.fingerprint
    assert dict(found.rows)["costs"].endswith("per image of 16 x 16")


def test_values_that_a_task_computed_are_shown(backbone: ViT, tmp_path: Path) -> None:
    model = MemoryViT(backbone)
    model.add_task("several", classes=["sun", "rain"], kind="multilabel")
    found = describe(model.save("several", tmp_path / "several.safetensors"))
    assert found.document["fitted"]["thresholds"] == [0.5, 0.5]
    assert dict(found.rows)["thresholds"] == "sun 0.5, rain 0.5"


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"\x80")
    with pytest.raises(EngramError, match="is a pickle, not an engram"):
        describe(tmp_path / "old.pt")


def test_several_files_and_lists_name_every_engram(path: Path) -> None:
    assert [row[0] for row in describe_engrams([path]).table] == [str(path)]
    listed = describe_list(str(path.parent), list_engrams(path.parent))
    assert [entry["task"] for entry in listed.document["engrams"]] == ["a"]
    assert [row[0] for row in listed.table] == ["a"]
    assert describe_list("empty", []).rows == [("engrams", "none in empty")]


def test_a_dry_run_of_a_push_shows_header_and_card(path: Path) -> None:
    planned = push(path, "ann/a", dry_run=True)
    rows = dict(describe_push(planned, dry_run=True).rows)
    assert rows["would be sent to"] == "ann/a"
    assert json.loads(rows["a.safetensors header"])["metrics"] == {"accuracy": 0.5}
    assert planned.card in rows["README.md"]
    assert "README.md" not in dict(describe_push(planned, dry_run=False).rows)
