"""All caches of a machine: what they hold, and that removing them touches nothing else."""

import json
import os
import time
from pathlib import Path

import pytest
from tests.support.training import filled

import engram
from engram.errors import EngramError, Notice
from engram.train.features.caches import clear, default_root, info, limit, make_room, room


def test_the_environment_says_where_caches_are(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_root() == own_cache
    monkeypatch.delenv("ENGRAM_CACHE")
    monkeypatch.setenv("HOME", "/home/ann")
    assert default_root() == Path("/home/ann/.cache/engram")


def test_an_empty_place_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path / "none" / "yet"))
    assert info() == []
    assert clear() == 0
    assert room() > 0


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


def a_cache(root: Path, number: int, backbone: str, size: int, days: float) -> str:
    """A cache of so many bytes that was used so many days ago; its key."""
    folder = root / f"{number:024x}"
    folder.mkdir(parents=True)
    meta = json.dumps({"backbone": backbone, "fingerprint": f"{number}abc"})
    (folder / "meta.json").write_text(meta)
    (folder / "a.data").write_bytes(bytes(size - len(meta)))
    used = time.time() - days * 86_400
    os.utime(folder / "meta.json", (used, used))
    return folder.name


def keys() -> list[int]:
    return [int(entry["key"], 16) for entry in info()]


def test_caches_are_removed_by_backbone_by_age_and_by_size(own_cache: Path) -> None:
    for number, (backbone, days) in enumerate([("b", 9.0), ("a", 2.0), ("a", 40.0), ("a", 1.0)]):
        a_cache(own_cache, number, backbone, 1000, days)
    assert clear(backbone="b", unused_days=10) == 0
    assert clear(unused_days=30) == 1000
    assert keys() == [0, 1, 3]
    assert clear(down_to=2500) == 1000  # the one that was used longest ago
    assert keys() == [1, 3]
    assert clear(backbone="3ab") == 1000
    assert keys() == [1]
    with pytest.raises(EngramError, match="caches of a"):
        clear(backbone="b")


def test_a_limit_makes_room_but_not_of_what_is_in_use(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, days in enumerate([3.0, 2.0, 0.0]):
        a_cache(own_cache, number, "a", 1000, days)
    assert make_room(10**15)  # without a limit the disk alone decides
    monkeypatch.setenv("ENGRAM_CACHE_LIMIT", "0.0000025")  # 2,500 bytes
    assert make_room(1000)
    assert keys() == [2]
    assert not make_room(2000)
    assert not make_room(3000)
    assert keys() == [2]
    monkeypatch.setenv("ENGRAM_CACHE_LIMIT", "much")
    with pytest.raises(EngramError, match="ENGRAM_CACHE_LIMIT"):
        limit()


def test_a_run_beyond_the_limit_trains_without_the_cache(
    small_backbone: Path, noise: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engram.MemoryViT(engram.load_backbone(small_backbone))
    model.add_task("t", ["a", "b"], regime="head")
    recipe = engram.Recipe(epochs=1, batch=4, workers=0)
    monkeypatch.setenv("ENGRAM_CACHE_LIMIT", "0.000001")
    with pytest.warns(Notice, match="ENGRAM_CACHE_LIMIT"):
        engram.fit(model, "t", str(noise), recipe)
    assert not any(entry["images"] for entry in info())
