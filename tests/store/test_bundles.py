"""Engrams that fit one backbone become one folder; those that don't are refused with both names."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from engram import EngramError, MemoryViT, random_backbone, save_backbone
from engram.backbones.load import load_backbone
from engram.images.preprocessing import Preprocessing
from engram.inference.engine import load_model
from engram.store.bundles import MAX_OLDER, is_bundle, read_bundle, read_engrams
from engram.store.compose import BundleChanged, add_to_bundle, compose, roll_back, update_bundle
from engram.store.engram import Engram
from engram.store.format import read_engram, write_engram
from engram.store.remote import MANIFEST
from engram.util.files import write_atomically
from engram.vit import ViT

NONE = 64 * "0"  # the content of no engram
SMALL = {"image_size": 16, "patch": 8, "width": 16, "depth": 2, "heads": 2}


@pytest.fixture
def backbone(tmp_path: Path) -> ViT:
    """A backbone that lies on disk, so that a model can be made from files alone."""
    plain = random_backbone(**SMALL)  # type: ignore[arg-type]
    plain.preprocessing = Preprocessing((16, 16), None)
    return load_backbone(save_backbone(plain, tmp_path / "backbone"))


@pytest.fixture
def paths(backbone: ViT, tmp_path: Path) -> dict[str, Path]:
    """a; b; c extends a; d extends c and b, all with answers of their own."""
    model = MemoryViT(backbone)
    for name, parents in {"a": [], "b": [], "c": ["a"], "d": ["c", "b"]}.items():
        task = model.add_task(name, classes=3, cells=2, extends=parents)
        torch.nn.init.normal_(task.head.weight)
    return {name: model.save(name, tmp_path / f"{name}.safetensors") for name in model.tasks}


def test_a_bundle_answers_as_its_engrams_did(
    backbone: ViT, paths: dict[str, Path], tmp_path: Path
) -> None:
    pixels = torch.rand(2, 3, 16, 16)
    model = MemoryViT(backbone)
    for path in paths.values():
        model.attach(path)
    bundle = compose([paths["d"], paths["c"], paths["b"], paths["a"]], tmp_path / "all")
    again = load_model(bundle.folder)
    assert again.backbone.preprocessing == backbone.preprocessing
    answers = model(pixels)
    for name, logits in again(pixels).items():
        assert torch.allclose(logits, answers[name], atol=1e-5)


def test_parents_come_first_and_the_rest_as_given(paths: dict[str, Path], tmp_path: Path) -> None:
    bundle = compose([paths[n] for n in "dcba"], tmp_path / "all")
    names = [engram.spec.name for engram in bundle.engrams]
    assert names.index("a") < names.index("c") < names.index("d") > names.index("b")
    assert [e.spec.name for e in compose([paths["b"], paths["a"]], tmp_path / "two").engrams] == [
        "b",
        "a",
    ]


def test_the_manifest_says_what_is_inside(paths: dict[str, Path], tmp_path: Path) -> None:
    bundle = compose([paths["a"], paths["c"]], tmp_path / "new" / "folder")
    manifest = json.loads((bundle.folder / MANIFEST).read_text("utf-8"))
    a, c = (read_engram(paths[name]) for name in "ac")
    assert manifest == {
        "format": 1,
        "backbone": {"source": a.backbone.source, "fingerprint": a.backbone.fingerprint},
        "preprocessing": a.preprocessing.to_dict(),  # type: ignore[union-attr]
        "engrams": [
            {"task": "a", "file": "a.safetensors", "content": a.content},
            {"task": "c", "file": "c.safetensors", "content": c.content},
        ],
    }
    assert sorted(os.listdir(bundle.folder)) == ["a.safetensors", MANIFEST, "c.safetensors"]
    assert read_engram(bundle.folder / "c.safetensors").header() == c.header()


def test_bundles_and_files_mix_and_repeat(paths: dict[str, Path], tmp_path: Path) -> None:
    one = compose([paths["a"], paths["c"]], tmp_path / "one").folder
    two = compose([paths["a"], paths["b"]], tmp_path / "two").folder
    assert [e.spec.name for e in read_engrams([one, two, paths["d"], paths["a"]])] == [
        "a",
        "c",
        "b",
        "d",
    ]


def other_backbone(tmp_path: Path, **changes: object) -> Path:
    model = MemoryViT(random_backbone(**{**SMALL, **changes}))  # type: ignore[arg-type]
    model.backbone.preprocessing = Preprocessing((16, 16), None)
    model.add_task("other", classes=2)
    return model.save("other", tmp_path / "other.safetensors")


def refusal(*arguments: object, **options: object) -> str:
    with pytest.raises(EngramError) as caught:
        compose(*arguments, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_another_backbone_is_refused_by_both_names(paths: dict[str, Path], tmp_path: Path) -> None:
    other = other_backbone(tmp_path, seed=1)
    sentence = refusal([paths["a"], other], tmp_path / "out")
    for path in (paths["a"], other):
        assert str(path) in sentence
        assert read_engram(path).backbone.fingerprint[:12] in sentence
    assert not (tmp_path / "out").exists()


def test_another_preprocessing_is_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    engram = read_engram(paths["b"])
    other = replace(engram, preprocessing=Preprocessing((16, 16), 18))
    path = write_engram(tmp_path / "other.safetensors", other)
    sentence = refusal([paths["a"], path], tmp_path / "out")
    assert '"resize": null' in sentence
    assert '"resize": 18' in sentence


def test_two_tasks_of_one_name_are_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    engram = read_engram(paths["b"])
    clash = replace(engram, spec=replace(engram.spec, name="a"))
    path = write_engram(tmp_path / "clash.safetensors", clash)
    sentence = refusal([paths["a"], path], tmp_path / "out")
    assert str(paths["a"]) in sentence
    assert str(path) in sentence
    assert "'a'" in sentence


def test_parents_must_be_there_with_the_right_content(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    assert "extends 'a'" in refusal([paths["c"]], tmp_path / "out")
    engram = read_engram(paths["a"])
    other = replace(engram, tensors={n: t + 1 for n, t in engram.tensors.items()})
    path = write_engram(tmp_path / "again.safetensors", other)
    sentence = refusal([path, paths["c"]], tmp_path / "out")
    assert engram.content[:12] in sentence
    assert other.content[:12] in sentence


def test_a_regime_that_changes_the_backbone_stays_alone(
    backbone: ViT, paths: dict[str, Path], tmp_path: Path
) -> None:
    model = MemoryViT(backbone)
    model.add_task("loud", classes=2, regime="memory")
    loud = model.save("loud", tmp_path / "loud.safetensors")
    for order in ([paths["a"], loud], [loud, paths["a"]]):
        assert "'loud' has the regime 'memory'" in refusal(order, tmp_path / "out")
    assert load_model(compose([loud], tmp_path / "alone").folder).tasks.keys() == {"loud"}


def test_a_backbone_is_checked(backbone: ViT, paths: dict[str, Path], tmp_path: Path) -> None:
    other = save_backbone(random_backbone(**SMALL, seed=1), tmp_path / "elsewhere")  # type: ignore[arg-type]
    sentence = refusal([paths["a"]], tmp_path / "out", backbone=other)
    assert backbone.fingerprint[:12] in sentence
    assert load_backbone(other).fingerprint[:12] in sentence
    compose([paths["a"]], tmp_path / "out", backbone=backbone.source)
    with pytest.raises(EngramError, match="was trained on"):
        load_model(paths["a"], backbone=other)


def test_a_backbone_that_moved_is_asked_for(paths: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "backbone").rename(tmp_path / "moved")
    with pytest.raises(EngramError, match="with backbone"):
        load_model(paths["a"])
    assert load_model(paths["a"], backbone=tmp_path / "moved").tasks.keys() == {"a"}


# What is there is never lost


def test_a_bundle_is_replaced_but_nothing_else(paths: dict[str, Path], tmp_path: Path) -> None:
    out = compose([paths["a"]], tmp_path / "out").folder
    compose([paths["b"]], out, overwrite=True)
    assert sorted(os.listdir(out)) == ["b.safetensors", MANIFEST]
    (out / "notes.txt").write_text("mine")
    assert "notes.txt" in refusal([paths["a"]], out, overwrite=True)
    assert (out / "b.safetensors").exists()
    assert "not a bundle" in refusal([paths["a"]], tmp_path)
    assert "is a file" in refusal([paths["a"]], paths["b"])
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".engram")]


def test_tasks_of_a_bundle_are_lost_only_with_overwrite(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    """A service may be serving them."""
    out = compose([paths["a"], paths["b"]], tmp_path / "out").folder
    before = (out / "a.safetensors").read_bytes()
    model = load_model(paths["a"])
    torch.nn.init.normal_(model.task("a").head.weight)
    retrained = model.save("a", tmp_path / "again.safetensors")
    for sources, lost in (([retrained, paths["b"]], "a"), ([paths["a"]], "b")):
        said = refusal(sources, out)
        assert f"task {lost} would" in said
        assert "overwrite" in said
        assert (out / "a.safetensors").read_bytes() == before
        assert [e.spec.name for e in read_bundle(out).engrams] == ["a", "b"]
    compose([retrained, paths["b"]], out, overwrite=True)
    assert (out / "a.safetensors").read_bytes() == retrained.read_bytes()


def test_a_task_that_came_meanwhile_is_not_lost(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service attaches a task after compose has read the bundle."""
    out = compose([paths["a"]], tmp_path / "out").folder

    def then_attached(sources: list[Path]) -> tuple[Engram, ...]:
        found, old = read_engrams(sources), read_bundle(out)
        update_bundle(old, old.plus(read_engram(paths["b"])))
        return found

    monkeypatch.setattr("engram.store.compose.read_engrams", then_attached)
    assert "task b would" in refusal([out, paths["c"]], out)
    assert [e.spec.name for e in read_bundle(out).engrams] == ["a", "b"]


def test_an_empty_folder_may_become_a_bundle(paths: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert is_bundle(compose([paths["a"]], tmp_path / "out").folder)


def test_a_failure_keeps_the_old_bundle(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = compose([paths["a"]], tmp_path / "out").folder
    rename = os.rename

    def fails_for_the_new(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails_for_the_new)
    assert "No space left" in refusal([paths["b"]], out, overwrite=True)
    assert [e.spec.name for e in read_bundle(out).engrams] == ["a"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".engram")]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("done", [False, True])
def test_an_interrupted_compose_leaves_a_whole_bundle(
    step: int, done: bool, paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at either rename, before it or behind it."""
    out = compose([paths["a"]], tmp_path / "out").folder
    rename, count = os.rename, 0

    def interrupted(source: Path, target: Path) -> None:
        nonlocal count
        count += 1
        if count != step or done:
            rename(source, target)
        if count == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compose([paths["b"]], out, overwrite=True)
    expected = "b" if (step, done) == (2, True) else "a"
    assert [e.spec.name for e in read_bundle(out).engrams] == [expected]


def test_a_bundle_that_cannot_be_put_back_is_named(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = compose([paths["a"]], tmp_path / "out").folder
    rename = os.rename

    def only_away(source: Path, target: Path) -> None:
        if target == out:
            raise OSError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", only_away)
    assert "the old folder is now" in refusal([paths["b"]], out, overwrite=True)
    (kept,) = tmp_path.glob(".engram-*")
    assert [e.spec.name for e in read_bundle(kept).engrams] == ["a"]


@pytest.mark.system
def test_a_killed_compose_leaves_nothing_or_a_whole_bundle(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    random = Random(0)
    seen = set()
    compose([paths["a"]], out)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            while True:
                compose([paths["a"]], out, overwrite=True)
                compose([paths["a"], paths["b"]], out)
        time.sleep(random.uniform(0.01, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.add(len(read_bundle(out).engrams) if out.exists() else 0)
    assert seen <= {0, 1, 2}
    assert seen & {1, 2}
    compose([paths["a"]], out, overwrite=True)
    assert [e.spec.name for e in read_bundle(out).engrams] == ["a"]


# A damaged bundle


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": 2}, "format 2"),
        ({"engrams": []}, "engrams is an empty list"),
        ({"format": 10**400}, "damaged"),
        ({"format": None}, "format is null"),
        ({"engrams": None}, "damaged"),
        ({"engrams": [{"task": "a"}]}, "damaged"),
        ({"engrams": [{"task": "../a", "file": "../a.safetensors", "content": ""}]}, "damaged"),
        ({"engrams": [{"task": "b", "file": "b.safetensors", "content": ""}]}, "damaged"),
        ({"engrams": [{"task": "b", "file": "b.safetensors", "content": NONE}]}, "No such file"),
        ({"engrams": [{"task": "a", "file": "a.safetensors", "content": NONE}]}, "lists 'a'"),
        ({"backbone": {"source": "x", "fingerprint": "y"}}, "says that its backbone"),
        ({"preprocessing": None}, "says that its preprocessing"),
    ],
)
def test_a_damaged_manifest_is_refused(
    change: dict[str, object], expected: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    out = compose([paths["a"]], tmp_path / "out").folder
    manifest = json.loads((out / MANIFEST).read_text("utf-8"))
    (out / MANIFEST).write_text(json.dumps({**manifest, **change}), "utf-8")
    with pytest.raises(EngramError, match=expected):
        read_bundle(out)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"3"])
def test_what_is_no_manifest_is_refused(
    text: bytes, paths: dict[str, Path], tmp_path: Path
) -> None:
    out = compose([paths["a"]], tmp_path / "out").folder
    (out / MANIFEST).write_bytes(text)
    with pytest.raises(EngramError, match="damaged"):
        read_bundle(out)
    with pytest.raises(EngramError, match="damaged"):
        compose([paths["b"]], out)  # it is unknown what would be lost


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match="not a bundle"):
        read_bundle(tmp_path)
    with pytest.raises(EngramError, match="no engrams"):
        load_model([])


def test_a_bundle_grows_and_a_task_that_was_trained_again_is_replaced(
    backbone: ViT, paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, raced = tmp_path / "garden", []

    def tasks() -> list[str]:
        return [engram.spec.name for engram in read_bundle(folder).engrams]

    def second_try(*given: object) -> None:  # somebody else was first, once
        if not raced:
            raced.append(given)
            raise BundleChanged("Somebody else was first.")
        update_bundle(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("engram.store.compose.update_bundle", second_try)
    add_to_bundle(folder, [paths["b"]])
    assert tasks() == ["b"]
    add_to_bundle(folder, [paths["a"], paths["c"]])
    assert raced
    assert tasks() == ["b", "a", "c"]
    add_to_bundle(folder, [paths["c"], paths["b"], paths["d"]])  # the parent of c is there
    model = MemoryViT(backbone)
    model.add_task("b", classes=3, cells=1)
    again = model.save("b", tmp_path / "again.safetensors")
    folder = tmp_path / "other"
    add_to_bundle(folder, [paths["b"]])
    for _ in range(2):  # the second time there is nothing to do
        add_to_bundle(folder, [again])
        assert tasks() == ["b"]
    assert read_engram(folder / "b.safetensors").content == read_engram(again).content


# Versions


def retrained(path: Path, by: float) -> Engram:
    """The same task with another head."""
    engram = read_engram(path)
    return replace(engram, tensors={n: t * by for n, t in engram.tensors.items()})


def test_older_versions_are_kept_up_to_a_limit_and_go_with_their_task(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    folder = compose([paths["a"], paths["b"]], tmp_path / "out").folder
    versions = [read_engram(paths["b"]), *(retrained(paths["b"], by) for by in range(2, 9))]
    for engram in versions[1:]:
        add_to_bundle(folder, [write_engram(tmp_path / "new.safetensors", engram)])
    contents = [engram.content for engram in versions]
    bundle = read_bundle(folder)
    kept = [version.content for version in bundle.older["b"]]
    assert kept == contents[-2 : -2 - MAX_OLDER : -1]
    names = {path.name for path in (folder / "versions").iterdir()}
    assert names == {f"b-{content[:16]}.safetensors" for content in kept}
    # Back to the last, and to any; what they replace is kept, too.
    assert roll_back(folder, "b").engram("b").content == contents[-2]
    assert roll_back(folder, "b").engram("b").content == contents[-1]
    assert roll_back(folder, "b", kept[-1][:8]).engram("b").content == kept[-1]
    assert [v.content for v in read_bundle(folder).older["b"]] == [contents[-1], *kept[:-1]]
    with pytest.raises(EngramError, match="no older version"):
        roll_back(folder, "b", contents[0])
    with pytest.raises(EngramError, match="no older version"):
        roll_back(folder, "a")
    bundle = read_bundle(folder)
    update_bundle(bundle, bundle.minus("b"))
    assert not list((folder / "versions").iterdir())
    assert read_bundle(folder).older == {}


def test_parents_and_children_are_replaced_together(paths: dict[str, Path], tmp_path: Path) -> None:
    bundle = compose([paths["a"], paths["c"]], tmp_path / "out")
    parent = retrained(paths["a"], 2)
    with pytest.raises(EngramError, match="extends a 'a'"):
        bundle.plus(parent)
    child = replace(read_engram(paths["c"]), parents={"a": parent.content})
    new = bundle.plus(child, parent)
    update_bundle(bundle, new)
    assert read_bundle(bundle.folder).manifest() == new.manifest()
    with pytest.raises(EngramError, match="extends a 'a'"):
        roll_back(bundle.folder, "a")


def test_a_bundle_that_is_composed_again_keeps_the_versions_of_its_tasks(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    folder = compose([paths["a"], paths["b"]], tmp_path / "out").folder
    first, second = retrained(paths["a"], 2), retrained(paths["a"], 3)
    old = read_bundle(folder)
    update_bundle(old, old.plus(first).with_shadow(second))
    again = write_engram(tmp_path / "again.safetensors", second)
    compose([again, paths["b"]], folder, overwrite=True)
    contents = [version.content for version in read_bundle(folder).older["a"]]
    assert contents == [first.content, read_engram(paths["a"]).content]
    assert roll_back(folder, "a").engram("a").content == first.content
    compose([paths["b"]], folder, overwrite=True)
    assert sorted(os.listdir(folder)) == ["b.safetensors", MANIFEST]
    (folder / "versions").mkdir()
    (folder / "versions" / "mine.txt").write_text("keep")
    assert "mine.txt" in refusal([paths["a"], paths["b"]], folder)


def test_a_file_that_was_replaced_before_its_manifest_is_read_from_its_copy(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that was killed between the two leaves it."""
    old = compose([paths["a"], paths["b"]], tmp_path / "out")
    new = old.plus(retrained(paths["b"], 2))

    def killed(path: Path, data: bytes) -> None:
        if path.name == MANIFEST:
            raise KeyboardInterrupt
        write_atomically(path, data)

    monkeypatch.setattr("engram.store.compose.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        update_bundle(old, new)
    monkeypatch.undo()
    assert read_engram(old.folder / "b.safetensors").content == new.engram("b").content
    found = read_bundle(old.folder)
    assert found.manifest() == old.manifest()
    newer = found.plus(retrained(paths["b"], 3))
    update_bundle(found, newer)
    assert read_bundle(old.folder).manifest() == newer.manifest()


@pytest.mark.parametrize(
    "field",
    [{"older": []}, {"older": [{"content": "../../x", "until": ""}]}, {"shadow": "../x"}],
)
def test_versions_in_a_manifest_are_checked(
    paths: dict[str, Path], tmp_path: Path, field: dict[str, object]
) -> None:
    folder = compose([paths["a"]], tmp_path / "out").folder
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["engrams"][0] |= field
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(EngramError, match="damaged"):
        read_bundle(folder)
