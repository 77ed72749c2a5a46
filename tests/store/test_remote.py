"""What comes from the Hub is verified before it is used. The cache is a local directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.hubs import cached
from tests.support.waiting import computing_less_than

import engram
from engram import EngramError, MemoryViT, random_backbone
from engram.store.format import read_engram, serialise_engram, write_engram
from engram.store.remote import list_engrams, local_path
from engram.store.sharing import push


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = MemoryViT(random_backbone(width=16, heads=2, depth=1))
    model.add_task("flowers", classes=2, cells=1)
    model.add_task("trees", classes=3, cells=1)
    for name in model.tasks:
        model.save(name, f"{name}.safetensors")
    return tmp_path / "cache"


def files(*names: str) -> dict[str, bytes]:
    return dict(push([f"{n}.safetensors" for n in names], "ann/garden", dry_run=True).files)


def test_a_revision_is_what_it_was(cache: Path) -> None:
    first = cached(cache, "ann/garden", files("flowers"), "v1")
    second = cached(cache, "ann/garden", files("flowers", "trees"), "main", "v2")
    assert [f.task for f in list_engrams("hf:ann/garden")] == ["flowers", "trees"]
    assert [f.task for f in list_engrams("hf:ann/garden@v1")] == ["flowers"]
    assert [f.task for f in list_engrams("hf:ann/garden", revision="v1")] == ["flowers"]
    assert [f.task for f in list_engrams(f"hf:ann/garden@{first}")] == ["flowers"]
    assert (
        list_engrams("hf:ann/garden@v2")[0].source == f"hf:ann/garden@{second}/flowers.safetensors"
    )
    with pytest.raises(EngramError, match="not completely in the cache"):
        list_engrams("hf:ann/garden@v3")


def test_list_is_public_and_takes_folders(cache: Path, tmp_path: Path) -> None:
    cached(cache, "ann/garden", files("flowers", "trees"))
    online, here = engram.list("hf:ann/garden"), engram.list(tmp_path)
    assert [f.content for f in online] == [f.content for f in here]
    assert here[0].source == str(tmp_path / "flowers.safetensors")
    assert "engram flowers" in str(here[0])
    assert here[0].bytes == (tmp_path / "flowers.safetensors").stat().st_size
    assert "list" not in engram.__all__


def test_a_content_that_was_asked_for_is_checked(cache: Path) -> None:
    cached(cache, "ann/garden", files("flowers"))
    content = read_engram("flowers.safetensors").content
    assert local_path(f"hf:ann/garden/flowers.safetensors#{content}").is_file()
    assert local_path(f"hf:ann/garden#{content[:8]}").is_dir()
    with pytest.raises(EngramError, match="which you asked for"):
        local_path(f"hf:ann/garden/flowers.safetensors#{'0' * 64}")


@pytest.mark.parametrize("where", ["README.md", "bundle.json"])
@pytest.mark.parametrize("other", ["none", "exchanged with it"])
def test_a_file_that_is_not_what_its_repository_lists_is_refused(
    cache: Path, where: str, other: str
) -> None:
    sent = files("flowers")
    changed = replace(read_engram("flowers.safetensors"), recipe={})
    changed.tensors["head.bias"].add_(1)
    sent["flowers.safetensors"] = serialise_engram(changed)
    left = "bundle.json" if where == "README.md" else "README.md"
    if other == "none":
        del sent[left]
    else:
        write_engram("changed.safetensors", changed)
        sent[left] = push("changed.safetensors", "ann/garden", dry_run=True).files[left]
    cached(cache, "ann/garden", sent)
    with pytest.raises(EngramError, match="its card or manifest lists") as refused:
        local_path("hf:ann/garden/flowers.safetensors")
    advised = str(refused.value).partition("ask for ")[2].rstrip(".")
    pinned = local_path(advised)
    assert read_engram(pinned).content == changed.content  # the user's own word is stronger


def test_a_damaged_download_is_refused(cache: Path) -> None:
    sent = files("flowers")
    data = bytearray(sent["flowers.safetensors"])
    data[-1] ^= 1
    sent["flowers.safetensors"] = bytes(data)
    cached(cache, "ann/garden", sent)
    with pytest.raises(EngramError, match=r"is damaged.*hf cache rm model/ann/garden"):
        local_path("hf:ann/garden/flowers.safetensors")


def test_a_repository_without_a_card_is_read_as_well(cache: Path) -> None:
    sent = files("flowers")
    cached(cache, "ann/garden", {"flowers.safetensors": sent["flowers.safetensors"]})
    assert local_path("hf:ann/garden").name == "flowers.safetensors"
    two = files("flowers", "trees")
    plain = {name: data for name, data in two.items() if name.endswith(".safetensors")}
    cached(cache, "ann/two", {**plain, "model.safetensors": b"a backbone, say"})
    with pytest.raises(EngramError, match="name one"):
        local_path("hf:ann/two")
    assert len(list_engrams("hf:ann/two")) == 2


@pytest.mark.parametrize(
    "card",
    [
        b"---\nengrams: 5\n---\n",
        b"---\n: [\n---\n",
        b"---\nengrams: [{file: ../../x.safetensors, content: 1}, 3]\n---\n",
        b"\xff\xfe",
        b"---\n- a\n---\n",
    ],
)
def test_a_card_that_says_nonsense_is_no_obstacle(cache: Path, card: bytes) -> None:
    sent = files("flowers")
    del sent["bundle.json"]
    cached(cache, "ann/garden", {**sent, "README.md": card})
    assert [f.task for f in list_engrams("hf:ann/garden")] == ["flowers"]


def test_a_very_large_card_is_not_parsed(cache: Path) -> None:
    """YAML takes seconds per megabyte. The manifest lists the engrams as well."""
    sent = push("flowers.safetensors", "ann/garden", dry_run=True).files
    card = b"---\nengrams:\n" + b"- {file: x.safetensors, content: y}\n" * 100_000 + b"---\n"
    cached(cache, "ann/garden", {**sent, "README.md": card})
    with computing_less_than(2):
        assert [found.task for found in list_engrams("hf:ann/garden")] == ["flowers"]


def test_nothing_there_is_a_sentence(cache: Path) -> None:
    cached(cache, "ann/empty", {"README.md": b"# Nothing"})
    with pytest.raises(EngramError, match="has no engrams at main"):
        list_engrams("hf:ann/empty")
    cached(cache, "ann/garden", files("flowers"))
    with pytest.raises(EngramError, match=r"has no none.safetensors.*there is flowers.safetensors"):
        local_path("hf:ann/garden/none.safetensors")
    sent = files("flowers", "trees")
    del sent["trees.safetensors"]
    cached(cache, "ann/half", sent)
    with pytest.raises(EngramError, match=r"has no trees.safetensors"):
        local_path("hf:ann/half")


def test_a_manifest_is_verified_as_a_bundle(cache: Path) -> None:
    sent = files("flowers")
    manifest = json.loads(sent["bundle.json"])
    manifest["backbone"]["fingerprint"] = "0" * 64
    sent["bundle.json"] = json.dumps(manifest).encode()
    cached(cache, "ann/garden", sent)
    with pytest.raises(EngramError, match="says that its backbone is"):
        engram.load_model("hf:ann/garden")
