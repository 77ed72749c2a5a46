"""Nothing of the user's machine is in what others get, and everything else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engram import MemoryViT, random_backbone
from engram.store.compose import write_bundle
from engram.store.format import read_engram, write_engram
from engram.store.portable import without_local_paths
from engram.store.sharing import push


def test_nothing_of_this_machine_goes_out(folder: Path) -> None:
    planned = push(["flowers.safetensors", "roses.safetensors"], "ann/garden", dry_run=True)
    for name, data in planned.files.items():
        for private in (b"secret-project", b"/home", b"Users", str(folder).encode(), b"me.jpg"):
            assert private not in data, name
    assert b"our-vit" in planned.files["flowers.safetensors"]
    assert any("is sent as our-vit" in text for text in planned.changed)
    note = planned.engrams[0].recipe["note"]
    assert note == "see notes.txt, x.txt and w/o https://a.org/b"


def test_a_header_has_no_path_of_the_data(tmp_path: Path) -> None:
    """Nor has that of a bundle, of an engram whose header has one."""
    model = MemoryViT(random_backbone(image_size=16, patch=8, width=16, depth=1, heads=2))
    model.add_task("t", classes=2)
    for data, name in ((tmp_path / "secret" / "pets", "pets"), ("hf:ann/pets", "hf:ann/pets")):
        metrics = {"val": {"unreadable": [f"{data}/me.jpg"]}}
        path = model.save("t", tmp_path / "t.safetensors", metrics=metrics, recipe={"data": data})
        assert read_engram(path).recipe["data"] == name
        assert b"secret" not in path.read_bytes()
        assert b"me.jpg" not in path.read_bytes()
    telling = replace(read_engram(path), recipe={"data": "/home/ann/secret/pets"})
    write_bundle([telling], tmp_path / "bundle", overwrite=False)
    assert b"secret" not in (tmp_path / "bundle" / "t.safetensors").read_bytes()


def test_what_needs_no_change_goes_out_byte_for_byte(folder: Path) -> None:
    mine = read_engram("roses.safetensors")
    clean = replace(
        mine, backbone=replace(mine.backbone, source="google/vit-base-patch32-224-in21k")
    )
    write_engram("clean.safetensors", clean)
    planned = push("clean.safetensors", "ann/roses", dry_run=True)
    assert planned.files["roses.safetensors"] == (folder / "clean.safetensors").read_bytes()
    assert planned.changed == ()


@pytest.mark.parametrize(
    ("source", "goes_out"),
    [
        ("/data/vit", "vit"),
        ("~/vit", "vit"),
        ("../models/vit/", "vit"),
        (r"C:\models\vit", "vit"),
        (r"\\server\share\vit", "vit"),
        ("file:///data/vit", "vit"),
        ("file://server/data/vit", "vit"),
        ("/data/models, old/vit", "vit"),
        ("here/vit", "vit"),  # is a folder right now
        ("google/vit-base-patch32-224-in21k@main", "google/vit-base-patch32-224-in21k@main"),
        ("pico", "pico"),
        ("random (seed 0)", "random (seed 0)"),
        ("ViTModel (an object)", "ViTModel (an object)"),
    ],
)
def test_sources_of_backbones(source: str, goes_out: str, folder: Path) -> None:
    (folder / "here" / "vit").mkdir(parents=True)
    mine = read_engram("roses.safetensors")
    mine = replace(mine, backbone=replace(mine.backbone, source=source))
    assert without_local_paths(mine)[0].backbone.source == goes_out
    assert without_local_paths(mine, "ann/vit")[0].backbone.source == "ann/vit"


@pytest.mark.parametrize(
    ("data", "goes_out"),
    [
        ("inaturalist2017:/home/ann/inat", "inaturalist2017:inat"),
        ("cifar100:~/cifar", "cifar100:cifar"),
        ("cifar100:here/photos", "cifar100:photos"),  # is a folder right now
        ("hf:here/photos", "hf:photos"),
        ("hf:/home/ann/photos", "hf:photos"),
        ("hf:../photos", "hf:photos"),
        (r"hf:C:\Users\ann\photos", "hf:photos"),
        ("/home/ann/secret, client/roses", "roses"),
        ("/home/ann/secret /roses", "roses"),
        ("/home/ann/pictures::/home/ann/masks", "pictures::masks"),
        ("/home/ann/client::old/roses", "roses"),
        ("cifar100", "cifar100"),
        ("hf:ann/photos:small", "hf:ann/photos:small"),
        ("cifar100:ann/photos", "cifar100:ann/photos"),
    ],
)
def test_names_of_data(data: str, goes_out: str, folder: Path) -> None:
    (folder / "here" / "photos").mkdir(parents=True)
    mine = replace(read_engram("roses.safetensors"), recipe={"data": data})
    write_engram("mine.safetensors", mine)
    planned = push("mine.safetensors", "ann/roses", dry_run=True)
    assert planned.engrams[0].recipe["data"] == goes_out
    for private in ("/home", "Users", "client", "here/", "~"):
        assert private not in planned.card


@pytest.mark.parametrize(
    ("note", "goes_out"),
    [
        ("trained on file:///home/ann/photos, twice", "trained on photos, twice"),
        ("file://server/home/ann/a and b", "a and b"),
        ("data:/home/ann/a; out='/home/ann/b'", "data:a; out='b'"),
        ("https://a.org/b http://h:8080/x s3://bucket/key", None),
        ("hf:ann/photos:small, and/or 1/2", None),
    ],
)
def test_paths_in_sentences(note: str, goes_out: str | None, folder: Path) -> None:
    mine = replace(read_engram("roses.safetensors"), recipe={"note": note})
    assert without_local_paths(mine)[0].recipe["note"] == (goes_out or note)


def test_a_class_that_looks_like_a_path_is_warned_of(folder: Path) -> None:
    model = MemoryViT(random_backbone())
    model.add_task("odd", classes=["/home/ann/cats", "dog"])
    model.save("odd", "odd.safetensors")
    planned = push("odd.safetensors", "ann/odd", dry_run=True)
    assert "/home/ann/cats" in planned.warnings[0]
    assert "is sent as it is" in planned.warnings[0]
