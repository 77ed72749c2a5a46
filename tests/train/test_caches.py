"""All caches of a machine: what they hold, and that removing them touches nothing else."""

from pathlib import Path

import pytest
from tests.support.training import filled

from engram.train.caches import clear, default_root, info, room


def test_the_environment_says_where_caches_are(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_root() == own_cache
    monkeypatch.delenv("ENGRAM_CACHE")
    monkeypatch.setenv("HOME", "/home/ann")
    assert default_root() == Path("/home/ann/.cache/engram")


def test_an_empty_place_holds_nothing(tmp_path: Path) -> None:
    assert info(tmp_path / "none") == []
    assert clear(tmp_path / "none") == 0
    assert room(tmp_path / "none" / "yet") > 0


def test_what_is_not_a_cache_is_left_alone(
    small_backbone: Path, noise: Path, own_cache: Path
) -> None:
    kept = filled(small_backbone, noise)
    holiday = own_cache / "holiday"
    holiday.mkdir()
    (holiday / "meta.json").write_text('{"fingerprint": "of a camera"}')
    (own_cache / ("0" * 24)).mkdir()
    (own_cache / ("0" * 24) / "meta.json").write_text("no JSON")
    [entry] = info()
    assert entry["key"] == kept.folder.name
    assert entry["images"] == 12
    size = sum(path.stat().st_size for path in kept.folder.iterdir())
    assert clear() == entry["bytes"] == size
    assert not kept.folder.exists()
    assert sorted(path.name for path in own_cache.iterdir()) == ["0" * 24, "holiday"]
    assert info() == []
