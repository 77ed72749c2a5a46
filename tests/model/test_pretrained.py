"""huggingface_hub's names for bundles: what was saved or pushed answers bit for bit the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.engrams import randomised
from tests.support.hubs import HubClient, LocalHub

import engram
from engram import EngramError, MemoryViT, load_backbone, save_backbone
from engram.store.bundles import read_bundle


@pytest.fixture
def garden(small_backbone: Path) -> MemoryViT:
    """Flowers, and roses, which extends it."""
    model = MemoryViT(load_backbone(small_backbone)).eval()
    randomised(model.add_task("flowers", ["rose", "tulip"], 3))
    randomised(model.add_task("roses", 4, 2, extends=["flowers"]))
    return model


def same_answers(ours: MemoryViT, theirs: MemoryViT) -> bool:
    pixels = torch.rand(3, 3, 16, 16)
    with torch.no_grad():
        a, b = ours(pixels), theirs(pixels)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_was_saved_answers_bit_for_bit_the_same(garden: MemoryViT, tmp_path: Path) -> None:
    assert garden.save_pretrained(tmp_path / "garden") is None
    found = sorted(path.name for path in (tmp_path / "garden").iterdir())
    assert found == ["bundle.json", "flowers.safetensors", "roses.safetensors"]  # and no backbone
    again = MemoryViT.from_pretrained(tmp_path / "garden")
    assert not again.training
    assert same_answers(garden, again)
    assert list(MemoryViT.from_pretrained(tmp_path / "garden" / "flowers.safetensors").tasks) == [
        "flowers"
    ]
    garden.detach("roses")
    garden.save_pretrained(tmp_path / "garden")  # in place of the old bundle
    assert list(MemoryViT.from_pretrained(str(tmp_path / "garden")).tasks) == ["flowers"]


def test_a_subclass_makes_its_own_kind(garden: MemoryViT, tmp_path: Path) -> None:
    class Ours(MemoryViT):
        pass

    garden.save_pretrained(tmp_path / "garden")
    assert type(Ours.from_pretrained(tmp_path / "garden")) is Ours


def test_the_backbone_can_be_given(garden: MemoryViT, small_backbone: Path, tmp_path: Path) -> None:
    moved = save_backbone(load_backbone(small_backbone), tmp_path / "moved")
    model = MemoryViT(load_backbone(moved))
    randomised(model.add_task("t", 2))
    model.save_pretrained(tmp_path / "bundle")
    moved.rename(tmp_path / "gone")
    with pytest.raises(EngramError, match=r"names '.*moved'"):
        MemoryViT.from_pretrained(tmp_path / "bundle")
    for backbone in (small_backbone, str(small_backbone), load_backbone(small_backbone)):
        assert same_answers(
            model, MemoryViT.from_pretrained(tmp_path / "bundle", backbone=backbone)
        )
    other = engram.random_backbone(image_size=16, patch=4, width=32, depth=2, heads=2, seed=1)
    with pytest.raises(EngramError, match="was trained on"):
        MemoryViT.from_pretrained(tmp_path / "bundle", backbone=other)


def test_metrics_stay_with_the_weights_that_they_are_of(garden: MemoryViT, tmp_path: Path) -> None:
    garden.save("flowers", tmp_path / "f.safetensors", metrics={"test": {"accuracy": 0.9}})
    garden.save_pretrained(tmp_path / "a")
    again = MemoryViT.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    first, _ = read_bundle(tmp_path / "b").engrams
    assert first.metrics == {"test": {"accuracy": 0.9}}
    assert first.created == read_bundle(tmp_path / "a").engrams[0].created
    torch.nn.init.zeros_(again.task("flowers").head.weight)  # other weights: nothing is known
    assert again.engram("flowers").metrics == {}


def test_config_says_what_the_model_is(garden: MemoryViT) -> None:
    config = garden.config
    assert config["tasks"]["roses"]["extends"] == ["flowers"]
    assert config["tasks"]["flowers"]["classes"] == ["rose", "tulip"]
    assert config["backbone"]["fingerprint"] == garden.backbone.fingerprint
    assert config["preprocessing"]["size"] == [16, 16]


def test_what_is_no_bundle_is_refused(tmp_path: Path, small_backbone: Path) -> None:
    with pytest.raises(EngramError, match="no folder or file 'nowhere'"):
        MemoryViT.from_pretrained("nowhere")
    with pytest.raises(EngramError, match=r"is a ViT.*engram.load_backbone"):
        MemoryViT.from_pretrained(small_backbone)
    with pytest.raises(EngramError, match=r"has no bundle\.json"):
        MemoryViT.from_pretrained(tmp_path)
    with pytest.raises(EngramError, match="The model has no tasks"):
        MemoryViT(load_backbone(small_backbone)).save_pretrained(tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    model = MemoryViT(load_backbone(small_backbone))
    model.add_task("t", 2)
    with pytest.raises(EngramError, match=r"is not a bundle \(thesis.txt\)"):
        model.save_pretrained(tmp_path / "full")


def test_tasks_that_cannot_share_a_pass_are_no_bundle(small_backbone: Path, tmp_path: Path) -> None:
    model = MemoryViT(load_backbone(small_backbone), unmasked=True)
    model.add_task("a", 2, regime="memory")
    model.add_task("b", 2, regime="memory")
    with pytest.raises(EngramError, match="cannot share a pass"):
        model.save_pretrained(tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("method", "option", "sentence"),
    [
        ("from_pretrained", "device_map", "does not take device_map"),
        ("from_pretrained", "num_labels", "does not take num_labels"),
        ("save_pretrained", "private", "save_pretrained does not take private"),
        ("push_to_hub", "create_pr", "does not take create_pr"),
    ],
)
def test_other_options_are_refused_by_a_sentence(
    garden: MemoryViT, method: str, option: str, sentence: str
) -> None:
    with pytest.raises(EngramError, match=sentence):
        getattr(garden, method)("x", **{option: True})


# The real client of huggingface_hub and a Hub on this machine


def test_the_hub_gives_back_what_was_pushed(hub_client: HubClient, tmp_path: Path) -> None:
    hub = LocalHub()
    script = """
import os
import engram
import torch
from engram import MemoryViT, load_backbone, random_backbone, save_backbone
backbone = random_backbone(image_size=16, patch=4, width=32, depth=2, heads=2, seed=0)
save_backbone(backbone, "vit")
model = MemoryViT(load_backbone("vit")).eval()
torch.nn.init.normal_(model.add_task("flowers", ["rose", "tulip"]).head.weight)
pixels = torch.rand(2, 3, 16, 16)
expected = model(pixels)["flowers"]
same = lambda other: torch.equal(other(pixels)["flowers"], expected)
url = model.push_to_hub("garden", private=True, commit_message="First", token="hf_ann")
read = MemoryViT.from_pretrained
results = [same(read("ann/garden", backbone="vit", cache_dir="own"))]
results.append(same(read("ann/garden", backbone=load_backbone("vit"), cache_dir="own",
                         local_files_only=True)))
torch.nn.init.zeros_(model.task("flowers").head.weight)
model.save_pretrained("bundle", push_to_hub=True, repo_id="ann/garden", branch="next",
                      token="hf_ann", backbone="ann/vit")
results.append(same(read("ann/garden", backbone="vit")))
results.append(not same(read("ann/garden", revision="next", backbone="vit")))
results.append(read("ann/garden", revision="next", backbone="vit",
force_download=True).config["tasks"]
               .keys() == {"flowers"})
def said(work):
    try:
        work()
    except engram.EngramError as error:
        return str(error)
errors = [
    said(lambda: read("ann/garden", backbone="vit", cache_dir="empty", local_files_only=True)),
    said(lambda: read("ann/garden", revision="never", backbone="vit")),
    said(lambda: read("ann/nothing")),
    said(lambda: model.push_to_hub("garden", token="hf_bob")),
    said(lambda: model.push_to_hub("garden")),
]
out = [url, results, errors, os.path.isdir("own"), os.path.isdir("client-cache")]
"""
    with hub.running(hub_client.port):
        url, results, errors, own, usual = hub_client.run(script, tmp_path, token=None)
    assert url.startswith(f"{hub_client.endpoint}/ann/garden/commit/")
    assert results == [True] * 5
    assert own
    assert usual
    assert hub.visibility["ann/garden"] == "private"
    assert hub.messages[1] == "First"
    sent = [r for r in hub.requests if r.startswith("GET") and r.endswith("/flowers.safetensors")]
    assert len(sent) == 4  # into a cache of its own, main, next, and next again by force
    assert b"ann/vit" in hub.files("ann/garden", "next")["bundle.json"]
    for found, expected in zip(
        errors,
        [
            "could not be reached",
            "has no revision 'never'",
            "no Hub repository ann/nothing",
            "write to garden (401)",
            "--dry-run",
        ],
        strict=True,
    ):
        assert expected in found
