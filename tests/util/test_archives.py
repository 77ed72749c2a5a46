"""An archive that expands too far is refused before any of it is read."""

import zipfile
from pathlib import Path

import pytest

from engram.util import zip_files as archives
from engram.util.zip_files import available_memory, check_archive

ZEROS = bytes(10_000_000)


def write(path: Path, members: int, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for i in range(members):
            archive.writestr(f"{i}.npy", ZEROS)
    return path


def test_what_expands_as_usual_is_accepted(tmp_path: Path) -> None:
    check_archive(write(tmp_path / "small.npz", 20))  # 200 MB of zeros in 200 KB
    check_archive(write(tmp_path / "stored.npz", 3, zipfile.ZIP_STORED))


def test_declared_sizes_are_added_up_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "bomb.npz", 30)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it is read"))
    with pytest.raises(ValueError, match=r"has 0\.3 MB but expands to 300 MB"):
        check_archive(path)


def test_it_must_fit_into_the_memory_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "large.npz", 3, zipfile.ZIP_STORED)
    monkeypatch.setattr(archives, "available_memory", lambda: 20_000_000)
    with pytest.raises(ValueError, match="expands to 30 MB"):
        check_archive(path)
    monkeypatch.setattr(archives, "available_memory", lambda: None)  # not every system says it
    check_archive(path)


def test_other_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match="not a zip archive"):
        check_archive(tmp_path / "text.npz")
    with pytest.raises(ValueError, match="another way than by deflate"):
        check_archive(write(tmp_path / "lzma.npz", 1, zipfile.ZIP_LZMA))
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2)
    with pytest.raises(ValueError, match="it has 3 members"):
        check_archive(write(tmp_path / "many.npz", 3))


def test_the_free_memory_is_known_on_linux() -> None:
    free = available_memory()
    assert free is None or free > 1_000_000
