"""Engrams travel with what others need to know, and without what is nobody's business."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.repocard import metadata_load
from tests.support.hubs import LocalHub, ask, cached

import engram
from engram import EngramError, MemoryViT, random_trunk, save_trunk
from engram.cli import main as cli
from engram.images.preprocessing import Preprocessing
from engram.inference.load import load_model
from engram.store.bundles import compose, read_bundle
from engram.store.format import read_engram, serialise_engram, write_engram
from engram.store.portable import without_local_paths
from engram.store.sharing import pull, push

Output = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a trunk known by its whole path, flowers, and roses, which extends it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    trunk = random_trunk(image_size=16, patch=8, width=16, depth=2, heads=2)
    trunk.preprocessing = Preprocessing((16, 16), None)
    where = save_trunk(trunk, tmp_path / "secret-project" / "our-vit")
    model = MemoryViT(engram.load_trunk(where))
    model.add_task("flowers", classes=["rose", "tulip"], cells=3)
    model.add_task("roses", classes=7, cells=2, extends=["flowers"])
    model.save(
        "flowers",
        "flowers.safetensors",
        metrics={
            "val": {"accuracy": 0.9125, "loss": 0.3, "images": 100},
            "test": {"accuracy": 0.9, "macro_f1": 0.88, "unreadable": ["/home/ann/me.jpg"]},
        },
        recipe={
            "lr": 0.01,
            "data": str(tmp_path / "secret-project" / "photos"),
            "train_images": 1020,
            "note": r"see /home/ann/notes.txt, C:\Users\ann\x.txt and w/o https://a.org/b",
        },
    )
    model.save("roses", "roses.safetensors")
    return tmp_path


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def in_cache(folder: Path, *sources: str, repo: str = "ann/garden") -> str:
    """What a push would send, in the cache as a download leaves it."""
    return cached(folder / "cache", repo, push(list(sources), repo, dry_run=True).files)


# What a push sends


def test_a_dry_run_shows_every_file_and_the_card(folder: Path, capsys: Output) -> None:
    assert run("push", "flowers.safetensors", "--to", "ann/flowers", "--dry-run", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [f["file"] for f in shown["files"]] == [
        "flowers.safetensors", "bundle.json", "README.md",
    ]  # fmt: skip
    planned = push("flowers.safetensors", "ann/flowers", dry_run=True)
    assert [f["bytes"] for f in shown["files"]] == [len(d) for d in planned.files.values()]
    assert shown["card"] == planned.card == planned.files["README.md"].decode()
    assert shown["commit"] is None
    assert run("push", "flowers.safetensors", "--to", "ann/flowers", "--dry-run") == 0
    said = capsys.readouterr().out
    assert planned.card in said
    assert "would be sent to" in said
    assert shown["files"][0]["sha256"] in said


def test_nothing_of_this_machine_goes_out(folder: Path) -> None:
    planned = push(["flowers.safetensors", "roses.safetensors"], "ann/garden", dry_run=True)
    for name, data in planned.files.items():
        for private in (b"secret-project", b"/home", b"Users", str(folder).encode(), b"me.jpg"):
            assert private not in data, name
    assert b"our-vit" in planned.files["flowers.safetensors"]
    assert any("is sent as our-vit" in text for text in planned.changed)
    assert any("unreadable is sent as a number" in text for text in planned.changed)
    note = planned.engrams[0].recipe["note"]
    assert note == "see notes.txt, x.txt and w/o https://a.org/b"


def test_the_content_and_the_answers_stay_the_same(folder: Path) -> None:
    mine = read_engram("flowers.safetensors")
    (folder / "sent.safetensors").write_bytes(
        push("flowers.safetensors", "ann/flowers", dry_run=True).files["flowers.safetensors"]
    )
    sent = read_engram("sent.safetensors")  # verifies both hashes
    assert sent.content == mine.content
    assert sent.trunk.source == "our-vit"
    assert all(torch.equal(sent.tensors[n], t) for n, t in mine.tensors.items())


def test_what_needs_no_change_goes_out_byte_for_byte(folder: Path) -> None:
    mine = read_engram("roses.safetensors")
    clean = replace(mine, trunk=replace(mine.trunk, source="google/vit-base-patch32-224-in21k"))
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
def test_sources_of_trunks(source: str, goes_out: str, folder: Path) -> None:
    (folder / "here" / "vit").mkdir(parents=True)
    mine = read_engram("roses.safetensors")
    mine = replace(mine, trunk=replace(mine.trunk, source=source))
    assert without_local_paths(mine)[0].trunk.source == goes_out
    assert without_local_paths(mine, "ann/vit")[0].trunk.source == "ann/vit"


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
    model = MemoryViT(random_trunk())
    model.add_task("odd", classes=["/home/ann/cats", "dog"])
    model.save("odd", "odd.safetensors")
    planned = push("odd.safetensors", "ann/odd", dry_run=True)
    assert "/home/ann/cats" in planned.warnings[0]
    assert "is sent as it is" in planned.warnings[0]


# The card


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
    fingerprint = planned.engrams[0].trunk.fingerprint
    assert {"engram", "learnable-memory", f"engram-trunk-{fingerprint[:12]}"} <= {*front["tags"]}
    measured = front["model-index"][0]["results"][0]
    assert measured["metrics"][0] == {"type": "accuracy", "value": 0.9}
    assert [e["content"] for e in front["engrams"]] == [e.content for e in planned.engrams]
    for told in (
        "| flowers | classification | 2 classes (rose, tulip) | masked, 3 cells per layer |",
        "extends flowers",
        fingerprint,
        "photos, 1,020 training images",
        "| test | 0.9 |",
        "lr 0.01",
        'load_model("hf:ann/garden")',
        f"hf:ann/garden/flowers.safetensors#{planned.engrams[0].content[:12]}",
        planned.engrams[1].content,
    ):
        assert told in planned.card


def test_a_card_survives_odd_names(folder: Path) -> None:
    model = MemoryViT(random_trunk())
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
    metrics = {"test": {"accuracy": 0.91, "pixels": 10**400, "other": -(10**12)}}
    write_engram("big.safetensors", replace(read_engram("roses.safetensors"), metrics=metrics))
    card = push("big.safetensors", "ann/roses", dry_run=True).card
    assert "| test | 0.91 | 1000000" in card
    assert "-1e+12 |" in card


@pytest.mark.parametrize("regime", ["head", "full", "memory"])
def test_the_card_of_other_regimes_says_what_they_are(regime: str, folder: Path) -> None:
    model = MemoryViT(random_trunk(width=16, heads=2, depth=1))
    model.add_task("t", classes=2, regime=regime)
    model.save("t", "t.safetensors")
    card = push("t.safetensors", "ann/t", dry_run=True).card
    assert ("own copy of the ViT is in the file" in card) == (regime == "full")
    assert ("pass of its own" in card) == (regime in ("full", "memory"))


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
    model = MemoryViT(random_trunk(width=16, heads=2, depth=1))
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


# From a local directory laid out as the Hub's cache, in offline mode


def test_pull_brings_back_what_was_pushed(folder: Path, capsys: Output) -> None:
    commit = in_cache(folder, "flowers.safetensors", "roses.safetensors")
    assert run("pull", "hf:ann/garden", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [f["task"] for f in told["files"]] == ["flowers", "roses", None]
    assert told["files"][0]["source"] == f"hf:ann/garden@{commit}/flowers.safetensors"
    bundle = read_bundle("garden")
    assert [e.content for e in bundle.engrams] == [
        read_engram(f"{name}.safetensors").content for name in ("flowers", "roses")
    ]
    assert run("pull", "hf:ann/garden/flowers.safetensors", "-o", "one") == 0
    assert (folder / "one" / "flowers.safetensors").is_file()
    again = pull("hf:ann/garden")
    assert not any(one.new for one in again)


def test_pull_replaces_nothing_unasked(folder: Path) -> None:
    in_cache(folder, "flowers.safetensors")
    (folder / "x").mkdir()
    (folder / "x" / "flowers.safetensors").write_bytes(b"mine")
    with pytest.raises(EngramError, match="--overwrite"):
        pull("hf:ann/garden/flowers.safetensors", "x")
    assert (folder / "x" / "flowers.safetensors").read_bytes() == b"mine"
    with pytest.raises(EngramError, match="same content but another header"):
        pull("hf:ann/garden", ".")  # the one that was pushed, with the path of its trunk
    assert not (folder / "bundle.json").exists()
    (pulled,) = pull("hf:ann/garden/flowers.safetensors", "x", overwrite=True)
    assert read_engram(pulled.path).content == pulled.content


def test_pull_does_not_put_one_file_over_another(folder: Path) -> None:
    model = MemoryViT(engram.load_trunk("secret-project/our-vit"))
    model.add_task("flowers", classes=["oak", "elm"], cells=1)
    model.save("flowers", "trees.safetensors")
    in_cache(folder, "flowers.safetensors")
    in_cache(folder, "trees.safetensors", repo="bob/trees")
    both = [f"hf:{repo}/flowers.safetensors" for repo in ("ann/garden", "bob/trees")]
    refused = r"Both hf:ann/garden@.* and hf:bob/trees@.* would be written to x"
    with pytest.raises(EngramError, match=refused):
        pull(both, "x")
    assert not (folder / "x").exists()
    assert len(pull([both[0], both[0]], "x")) == 2  # the same twice is no harm


def test_attach_and_commands_take_the_hub(folder: Path, capsys: Output) -> None:
    in_cache(folder, "flowers.safetensors", "roses.safetensors")
    trunk = engram.load_trunk("secret-project/our-vit")
    mine, theirs = MemoryViT(trunk), MemoryViT(trunk)
    for name in ("flowers", "roses"):
        mine.attach(f"{name}.safetensors")
        theirs.attach(f"hf:ann/garden/{name}.safetensors")
    pixels = torch.randn(2, 3, 16, 16)
    assert torch.equal(mine(pixels)["roses"], theirs(pixels)["roses"])
    whole = load_model("hf:ann/garden", backbone="secret-project/our-vit")
    assert torch.equal(mine(pixels)["roses"], whole(pixels)["roses"])
    assert run("inspect", "hf:ann/garden") == 0
    assert run("inspect", "hf:ann/garden/roses.safetensors") == 0
    assert run("compose", "hf:ann/garden", "-o", "composed") == 0
    assert "roses" in capsys.readouterr().out


def test_attach_takes_a_bundle_of_one(folder: Path) -> None:
    in_cache(folder, "flowers.safetensors", repo="ann/flowers")
    in_cache(folder, "flowers.safetensors", "roses.safetensors")
    compose(["flowers.safetensors"], "one")
    compose(["flowers.safetensors", "roses.safetensors"], "two")
    model = MemoryViT(engram.load_trunk("secret-project/our-vit"))
    for one in ("hf:ann/flowers", "one", folder / "one"):
        assert model.attach(one).spec.name == "flowers"
        model.detach("flowers")
    for several in ("hf:ann/garden", "two"):
        with pytest.raises(EngramError, match=f"{several} is a bundle of 2 .*engram.load_model"):
            model.attach(several)
        assert model.attach(f"{several}/flowers.safetensors").spec.name == "flowers"
        model.detach("flowers")


def test_a_pulled_engram_asks_for_its_trunk(folder: Path) -> None:
    in_cache(folder, "flowers.safetensors")
    asks = "'our-vit' as its trunk; give its path or Hub id with --backbone"
    with pytest.raises(EngramError, match=asks):
        load_model("hf:ann/garden")


# A server on loopback that speaks the Hub's API, asked by the real huggingface_hub client


def test_the_real_client_pushes_to_and_pulls_from_a_local_server(folder: Path) -> None:
    hub = LocalHub()
    with hub.running() as endpoint:
        planned = push(
            ["flowers.safetensors", "roses.safetensors"], "ann/garden", dry_run=True
        ).files
        script = """
import engram
from engram.store.sharing import push, pull
from engram.store.remote import list_engrams
first = push(["flowers.safetensors", "roses.safetensors"], "ann/garden", private=True)
pulled = pull("hf:ann/garden", "back")
found = [f.source for f in list_engrams("hf:ann/garden")]
task = engram.MemoryViT(engram.load_trunk("secret-project/our-vit")).attach(
    f"hf:ann/garden@{first.commit}/flowers.safetensors")
branch = push("flowers.safetensors", "ann/garden", revision="alone", replace=True)
errors = []
for wrong in (
    lambda: push("flowers.safetensors", "ann/garden"),
    lambda: push("flowers.safetensors", "bob/garden"),
    lambda: pull("hf:ann/nothing"),
    lambda: pull("hf:ann/garden", revision="no-such"),
    lambda: pull("hf:ann/garden/none.safetensors"),
    lambda: pull("hf:ann/garden@alone/roses.safetensors"),
):
    try:
        wrong()
        errors.append("")
    except engram.EngramError as error:
        errors.append(str(error))
out = [first.url, first.commit, [p.content for p in pulled], found, task.spec.name, branch.commit,
       errors]
"""
        url, commit, contents, found, task, branch, errors = ask(
            endpoint, folder / "home", script, cwd=folder
        )
    assert url == f"{endpoint}/ann/garden"
    sent = hub.commits["ann/garden"][commit]
    assert {name: sent[name] for name in planned} == planned  # exactly what the dry run showed
    assert hub.visibility["ann/garden"] == "private"
    assert hub.messages[:2] == ["initial commit", "Push flowers, roses"]
    assert len([r for r in hub.requests if r.startswith("POST") and "/commit/" in r]) == 2
    assert contents[:2] == [
        read_engram(f"{name}.safetensors").content for name in ("flowers", "roses")
    ]
    assert found == [f"hf:ann/garden@{commit}/{n}.safetensors" for n in ("flowers", "roses")]
    assert task == "flowers"
    alone = hub.commits["ann/garden"][branch]
    assert {*alone} == {".gitattributes", "flowers.safetensors", "bundle.json", "README.md"}
    assert "already holds roses.safetensors" in errors[0]
    assert "refused to let you write to bob/garden (403)" in errors[1]
    assert errors[2].startswith("There is no Hub repository ann/nothing")
    assert errors[3] == "The Hub repository ann/garden has no revision 'no-such'."
    assert "has no none.safetensors" in errors[4]
    assert "has no roses.safetensors" in errors[5]


def test_a_local_server_that_refuses_and_one_that_is_gone(folder: Path) -> None:
    script = """
import engram
out = []
for call in (lambda: engram.push("flowers.safetensors", "ann/x"), lambda: engram.pull("hf:ann/x")):
    try:
        call()
    except engram.EngramError as error:
        out.append(str(error))
"""
    with LocalHub().running() as endpoint:
        wrong, none = ask(endpoint, folder / "home", script, token="hf_bob", cwd=folder)
    assert "refused to let you write to ann/x (401)" in wrong
    assert none.startswith("There is no Hub repository ann/x")
    gone = ask(endpoint, folder / "home", script, cwd=folder)
    assert gone[0].startswith("Nothing was sent to ann/x")
    assert "is not completely in the cache" in gone[1]
    (no_token, _) = ask(endpoint, folder / "home", script, token=None, cwd=folder)
    assert "No token" in no_token
    assert "hf auth login" in no_token


# Mistakes


def test_offline_mode_sends_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ann")
    with pytest.raises(EngramError, match=r"Nothing was sent to ann/x: offline mode is on"):
        push("flowers.safetensors", "ann/x")


def test_a_repository_of_a_whole_model_is_not_downloaded_to_see_that(folder: Path) -> None:
    hub = LocalHub()
    hub.commit("ann/vit", "main", {"config.json": b"{}", "model.safetensors": b"large"}, "x")
    script = """
import engram
try:
    engram.list("hf:ann/vit")
except engram.EngramError as error:
    out = str(error)
"""
    with hub.running() as endpoint:
        said = ask(endpoint, folder / "home", script, cwd=folder)
    assert "has no engrams at main" in said
    assert not any("model.safetensors" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["push", "flowers.safetensors", "--to", "garden", "--dry-run"], "hf:owner/name"),
        (["push", "flowers.safetensors", "--to", "a/b/c.safetensors", "--dry-run"], "names a file"),
        (["push", "none.safetensors", "--to", "a/b", "--dry-run"], "cannot be read"),
        (["push", "secret-project", "--to", "a/b", "--dry-run"], "not a bundle"),
        (
            ["push", "flowers.safetensors", "--to", "a/b", "--dry-run", "--backbone", "/x/y"],
            "give the Hub id",
        ),
        (["pull", "flowers.safetensors"], "is not on the Hub"),
        (["pull", "hf:nobody"], "is not an address on the Hub"),
        (["pull", "hf:ann/../x"], "is not an address on the Hub"),
        (["pull", "hf:ann/garden"], "offline mode is on"),
        (["pull", "hf:ann/garden@v1", "--revision", "v2"], "give one of the two"),
        (["list", "nowhere"], "no folder"),
    ],
)
def test_mistakes_are_sentences(
    arguments: list[str], sentence: str, folder: Path, capsys: Output
) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert "Traceback" not in said.err


def test_engrams_that_do_not_fit_do_not_travel_together(folder: Path) -> None:
    model = MemoryViT(random_trunk(width=32, heads=2))
    model.add_task("other", classes=2)
    model.save("other", "other.safetensors")
    with pytest.raises(EngramError, match="only on the same trunk"):
        push(["flowers.safetensors", "other.safetensors"], "ann/x", dry_run=True)


def test_a_bundle_goes_as_it_is(folder: Path) -> None:
    compose(["flowers.safetensors", "roses.safetensors"], "garden")
    (folder / "garden" / "private.txt").write_text("not this")
    planned = push("garden", "ann/garden", dry_run=True)
    assert [*planned.files] == [
        "flowers.safetensors", "roses.safetensors", "bundle.json", "README.md",
    ]  # fmt: skip
    assert serialise_engram(planned.engrams[0]) == planned.files["flowers.safetensors"]
