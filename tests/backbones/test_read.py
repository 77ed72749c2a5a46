"""Files that are no model, damaged ones, and the Hub from its cache: no test needs a network."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.torch import save_file
from tests.support.backbones import (
    google_names,
    refusal,
    timm_names,
    update,
)

from engram import EngramError, load_backbone, random_backbone


def test_paths_that_are_no_model(tmp_path: Path, folder: Path) -> None:
    assert "no file or folder" in refusal(tmp_path / "nothing")
    assert "no file or folder" in refusal(str(tmp_path / "nothing"))
    assert "no file or folder" in refusal("nothing")
    assert "no file" in refusal("models/nothing.safetensors")
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "text.txt").write_text("hello")
    assert "neither" in refusal(tmp_path / "text.txt")
    for name in ("a.pt", "a.pth", "pytorch_model.bin", "a.ckpt", "a.pkl"):
        assert "can run code" in refusal(tmp_path / name)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert "no model.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    assert "only pickles" in refusal(folder)
    assert "give the folder" in refusal(folder / "other.safetensors")
    for bad in ("", "{", "[]", "\xff", "{}"):
        (folder / "config.json").write_text(bad, "latin-1")
        assert "config.json" in refusal(folder)


def test_pico_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("engram.backbones.load.BUNDLED", tmp_path)
    with pytest.raises(EngramError, match="bundled backbone 'pico'"):
        load_backbone("pico")


# Damaged files


def test_truncated_files(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(timm_names(random_backbone(width=16, depth=1, heads=2)), file)
    whole = file.read_bytes()
    for length in [*range(0, 64, 7), *range(64, len(whole), len(whole) // 50), len(whole) - 1]:
        file.write_bytes(whole[:length])
        assert "safetensors" in refusal(file)
    file.write_bytes(whole + b"\0")
    assert "safetensors" in refusal(file)


def test_flipped_bits_in_the_header(tmp_path: Path) -> None:
    """Each is refused, or changes nothing but a remark: never another backbone in silence."""
    file = tmp_path / "a.safetensors"
    save_file(timm_names(random_backbone(width=16, depth=1, heads=2)), file, {"format": "pt"})
    whole = file.read_bytes()
    fingerprint = load_backbone(file).fingerprint
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    bits = [*range(64), *range(64, 8 * header, 29)]
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert load_backbone(file).fingerprint == fingerprint
        except EngramError:
            refused += 1
    assert refused > 0.95 * len(bits)


def test_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **google_names(random_backbone(width=16, depth=1, heads=2)))
    whole = (tmp_path / "a.npz").read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.npz").write_bytes(whole[:length])
        with pytest.raises(EngramError, match="damaged"):
            load_backbone(tmp_path / "a.npz")
    for at in range(30, len(whole) - 5000, 997):  # the archive has checksums
        (tmp_path / "a.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(EngramError):
            load_backbone(tmp_path / "a.npz")


def test_an_npz_that_expands_too_far_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "a.npz", zeros=np.zeros(3_000_000, np.float32))
    monkeypatch.setattr("engram.util.zip_files.MAX_SMALL", 1_000_000)
    with pytest.raises(EngramError, match="expands to 12 MB"):
        load_backbone(tmp_path / "a.npz")


def test_an_npz_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    claim = {"descr": "<f4", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(header, claim)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(80))
    with pytest.raises(EngramError, match=r"\.npz file"):
        load_backbone(tmp_path / "a.npz")


def test_a_header_or_configuration_that_is_too_large_is_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    entries = [f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(20_001)]
    text = ("{" + ",".join(entries) + "}").encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text)
    assert "more than 20,000 tensors" in refusal(folder)
    weights.write_bytes((2**26).to_bytes(8, "little") + b"{" + b" " * 2**26 + b"}")
    assert "its header is larger than 16 MB" in refusal(folder)
    weights.write_bytes(good)
    update(folder / "config.json", id2label={str(i): [[]] for i in range(400_000)})
    assert "more than 1,000,000 values" in refusal(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "nested too deeply" in refusal(folder)


# The Hub


@pytest.fixture
def cached(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository owner/name in a cache of the Hub, at two revisions."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "cache" / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repo / "refs" / revision).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
    for file in folder.iterdir():
        (repo / "snapshots" / ("a" * 40) / file.name).write_bytes(file.read_bytes())
    return repo


def test_a_hub_id_is_found_in_the_cache(cached: Path, folder: Path) -> None:
    backbone = load_backbone("owner/name")
    assert backbone.fingerprint == load_backbone(folder).fingerprint
    assert backbone.source == "owner/name"
    assert load_backbone("owner/name@main").source == "owner/name@main"
    assert load_backbone("hf:owner/name@main").source == "owner/name@main"  # as engrams are named
    assert load_backbone("owner/name", revision="main").source == "owner/name@main"
    assert "no config.json" in refusal("owner/name@v2")
    (cached / "snapshots" / ("b" * 40) / "config.json").write_text('{"model_type": "vit"}')
    assert "no model.safetensors" in refusal("owner/name@v2")


def test_without_a_network_the_sentence_says_what_was_tried(cached: Path) -> None:
    text = refusal("owner/other")
    for part in ("owner/other", "HF_HUB_OFFLINE", "path", str(cached.parent)):
        assert part in text
