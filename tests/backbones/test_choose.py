"""`--backbone auto`: which backbone is chosen, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.hubs import HubClient, LocalHub, cached

from engram import EngramError
from engram.backbones.recommended import choose_backbone

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}
BEST, OTHER = "facebook/dinov2-small", "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def choose(side: float | None, image_size: int | None = None) -> tuple[str, list[str]]:
    """The backbone that is chosen, and what is said meanwhile."""
    said: list[str] = []
    choice = choose_backbone(side, image_size, announce=said.append)
    assert choice.reason.endswith(".")
    return choice.source, said


def test_small_images_are_for_pico(cache: Path) -> None:
    cached(cache, BEST, FILES)
    assert choose(28) == ("pico", [])
    assert choose(48) == ("pico", [])
    assert choose(500, image_size=32) == ("pico", [])
    assert choose(None) == ("pico", [])  # nothing can be read: nothing is downloaded for that


def test_large_images_are_for_the_recommended_backbone(cache: Path) -> None:
    cached(cache, OTHER, FILES)
    cached(cache, BEST, FILES)
    assert choose(49) == (BEST, [])
    assert choose(32, image_size=224) == (BEST, [])


def test_without_a_network_another_backbone_of_this_machine_is_used(cache: Path) -> None:
    cached(cache, OTHER, FILES)
    source, (said,) = choose(500)
    assert source == OTHER
    assert OTHER in said
    assert said.endswith("backbones get dinov2-small")


def test_without_network_and_cache_it_is_pico_and_the_costs_are_said(cache: Path) -> None:
    source, (said,) = choose(500)
    assert source == "pico"
    assert "far lower accuracy" in said
    assert said.endswith("backbones get dinov2-small")


def test_the_backbone_takes_the_image_size(cache: Path) -> None:
    for repo in (BEST, OTHER):
        cached(cache, repo, FILES)
    assert choose(500, image_size=448)[0] == BEST  # a multiple of 14
    assert choose(500, image_size=384)[0] == OTHER  # of 16, and not of 14
    with pytest.raises(EngramError, match="a multiple of 14, 16 or 32"):
        choose(500, image_size=225)


CHOOSE = """
from engram.backbones.recommended import choose_backbone
events = []
choice = choose_backbone(
    500, announce=lambda text: events.append(text), progress=lambda *event: events.append(event)
)
out = [choice.source, events]
"""


def test_it_is_downloaded_once_with_its_size_said_before(
    hub_client: HubClient, tmp_path: Path
) -> None:
    hub = LocalHub()
    files = {"config.json": b"{}", "model.safetensors": bytes(3_000_000), "README.md": bytes(99)}
    hub.commit(BEST, "main", files, "first")
    with hub.running(hub_client.port):
        source, events = hub_client.run(CHOOSE, tmp_path, token=None)
        again = hub_client.run(CHOOSE, tmp_path, token=None)
    assert source == BEST
    assert events[0] == f"Downloading {BEST} once, about 88 MB, into the cache of the Hub."
    bars = [event for event in events[1:] if event[0] == f"downloading {BEST}"]
    assert bars == events[1:]
    assert bars[-1][1:] == [3_000_002, 3_000_002, "3 of 3 MB"]  # no file that is not needed
    assert again == [BEST, []]


def test_a_hub_that_is_down_is_no_network(hub_client: HubClient, tmp_path: Path) -> None:
    source, (said,) = hub_client.run(CHOOSE, tmp_path, token=None)
    assert source == "pico"
    assert "the Hub cannot be reached" in said
