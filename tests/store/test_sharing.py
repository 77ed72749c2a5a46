"""What was pushed is what others pull, attach and list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.hubs import HubClient, LocalHub, in_cache

import engram
from engram import EngramError, MemoryViT, random_backbone
from engram.cli import main as cli
from engram.inference.engine import load_model
from engram.store.bundles import read_bundle
from engram.store.compose import compose
from engram.store.format import read_engram, serialise_engram
from engram.store.sharing import pull, push

Output = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


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
    printed = capsys.readouterr().out
    assert planned.card in printed
    assert "would be sent to" in printed
    assert shown["files"][0]["sha256"] in printed


def test_the_content_and_the_answers_stay_the_same(folder: Path) -> None:
    mine = read_engram("flowers.safetensors")
    (folder / "sent.safetensors").write_bytes(
        push("flowers.safetensors", "ann/flowers", dry_run=True).files["flowers.safetensors"]
    )
    sent = read_engram("sent.safetensors")  # verifies both hashes
    assert sent.content == mine.content
    assert sent.backbone.source == "our-vit"
    assert all(torch.equal(sent.tensors[n], t) for n, t in mine.tensors.items())


def test_a_bundle_goes_as_it_is(folder: Path) -> None:
    compose(["flowers.safetensors", "roses.safetensors"], "garden")
    (folder / "garden" / "private.txt").write_text("not this")
    planned = push("garden", "ann/garden", dry_run=True)
    assert [*planned.files] == [
        "flowers.safetensors", "roses.safetensors", "bundle.json", "README.md",
    ]  # fmt: skip
    assert serialise_engram(planned.engrams[0]) == planned.files["flowers.safetensors"]


def test_engrams_that_do_not_fit_do_not_travel_together(folder: Path) -> None:
    model = MemoryViT(random_backbone(width=32, heads=2))
    model.add_task("other", classes=2)
    model.save("other", "other.safetensors")
    with pytest.raises(EngramError, match="only on the same backbone"):
        push(["flowers.safetensors", "other.safetensors"], "ann/x", dry_run=True)


def test_offline_mode_sends_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ann")
    with pytest.raises(EngramError, match="offline mode"):
        push("flowers.safetensors", "ann/x")


# From a local directory laid out as the Hub's cache, in offline mode


def test_pull_brings_back_what_was_pushed(folder: Path, capsys: Output) -> None:
    commit = in_cache(folder, "flowers.safetensors", "roses.safetensors")
    assert run("pull", "hf:ann/garden", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [f["task"] for f in document["files"]] == ["flowers", "roses", None]
    assert document["files"][0]["source"] == f"hf:ann/garden@{commit}/flowers.safetensors"
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
    with pytest.raises(EngramError, match="overwrite=True"):
        pull("hf:ann/garden/flowers.safetensors", "x")
    assert (folder / "x" / "flowers.safetensors").read_bytes() == b"mine"
    with pytest.raises(EngramError, match="same content but another header"):
        pull("hf:ann/garden", ".")  # the one that was pushed, with the path of its backbone
    assert not (folder / "bundle.json").exists()
    (pulled,) = pull("hf:ann/garden/flowers.safetensors", "x", overwrite=True)
    assert read_engram(pulled.path).content == pulled.content


def test_pull_does_not_put_one_file_over_another(folder: Path) -> None:
    model = MemoryViT(engram.load_backbone("secret-project/our-vit"))
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
    backbone = engram.load_backbone("secret-project/our-vit")
    mine, theirs = MemoryViT(backbone), MemoryViT(backbone)
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
    model = MemoryViT(engram.load_backbone("secret-project/our-vit"))
    for one in ("hf:ann/flowers", "one", folder / "one"):
        assert model.attach(one).spec.name == "flowers"
        model.detach("flowers")
    for several in ("hf:ann/garden", "two"):
        with pytest.raises(EngramError, match=f"{several} is a bundle of 2 .*engram.load_model"):
            model.attach(several)
        assert model.attach(f"{several}/flowers.safetensors").spec.name == "flowers"
        model.detach("flowers")


def test_a_pulled_engram_asks_for_its_backbone(folder: Path) -> None:
    in_cache(folder, "flowers.safetensors")
    asks = "'our-vit' as its backbone; give its path or Hub id with backbone"
    with pytest.raises(EngramError, match=asks):
        load_model("hf:ann/garden")


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
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert "Traceback" not in printed.err


# A server on loopback that speaks the Hub's API, asked by the real huggingface_hub client


def test_the_real_client_pushes_to_and_pulls_from_a_local_server(
    folder: Path, hub_client: HubClient
) -> None:
    hub = LocalHub()
    planned = push(["flowers.safetensors", "roses.safetensors"], "ann/garden", dry_run=True).files
    script = """
import engram
from engram.store.sharing import pull, push
from engram.store.remote import list_engrams
first = push(["flowers.safetensors", "roses.safetensors"], "ann/garden", private=True)
pulled = pull("hf:ann/garden", "back")
found = [f.source for f in list_engrams("hf:ann/garden")]
task = engram.MemoryViT(engram.load_backbone("secret-project/our-vit")).attach(
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
    with hub.running(hub_client.port):
        url, commit, contents, found, task, branch, errors = hub_client.run(script, folder)
    assert url == f"{hub_client.endpoint}/ann/garden"
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
    assert "write to bob/garden (403)" in errors[1]
    assert "no Hub repository ann/nothing" in errors[2]
    assert "no revision 'no-such'" in errors[3]
    assert "has no none.safetensors" in errors[4]
    assert "has no roses.safetensors" in errors[5]


def test_a_local_server_that_refuses_and_one_that_is_gone(
    folder: Path, hub_client: HubClient
) -> None:
    script = """
import engram
out = []
for call in (lambda: engram.push("flowers.safetensors", "ann/x"), lambda: engram.pull("hf:ann/x")):
    try:
        call()
    except engram.EngramError as error:
        out.append(str(error))
"""
    with LocalHub().running(hub_client.port):
        wrong, none = hub_client.run(script, folder, token="hf_bob")
    assert "write to ann/x (401)" in wrong
    assert none.startswith("There is no Hub repository ann/x")
    gone = hub_client.run(script, folder)
    assert gone[0].startswith("Nothing was sent to ann/x")
    assert "is not completely in the cache" in gone[1]
    (no_token, _) = hub_client.run(script, folder, token=None)
    assert "No token" in no_token
    assert "hf auth login" in no_token


def test_a_repository_of_a_whole_model_is_not_downloaded_to_see_that(
    folder: Path, hub_client: HubClient
) -> None:
    hub = LocalHub()
    hub.commit("ann/vit", "main", {"config.json": b"{}", "model.safetensors": b"large"}, "x")
    script = """
import engram
try:
    engram.list("hf:ann/vit")
except engram.EngramError as error:
    out = str(error)
"""
    with hub.running(hub_client.port):
        sentence = hub_client.run(script, folder)
    assert "has no engrams at main" in sentence
    assert not any("model.safetensors" in request for request in hub.requests)
