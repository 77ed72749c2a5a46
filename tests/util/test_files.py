"""A file is replaced completely or not at all."""

import os
import re
import resource
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from engram import EngramError
from engram.util.files import (
    check_renamable,
    check_replaceable,
    check_writable,
    make_folder,
    open_regular,
    replaced_folder,
    write_atomically,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old" * 1000)
    return path


def forked(work: Callable[[], None]) -> int:
    """Run in a child process; gives how it ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def temporary_files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


@pytest.mark.system
def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    """Killed forty times while it writes one of two large files over and over."""
    versions = [bytes([i]) * 2_000_000 for i in range(2)]
    folder = tmp_path / "folder"
    folder.mkdir()
    target = folder / "t.bin"
    write_atomically(target, versions[0])
    random = Random(0)
    kills = 0
    while kills < 40 or not temporary_files(folder):  # it was killed in the middle of writing
        kills += 1
        child = os.fork()
        if child == 0:
            while True:
                for version in versions:
                    write_atomically(target, version)
        time.sleep(random.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert target.read_bytes() in versions
    assert [p.name for p in folder.glob("*.bin")] == ["t.bin"]
    before = len(temporary_files(folder))
    write_atomically(target, versions[1])
    assert target.read_bytes() == versions[1]
    assert len(temporary_files(folder)) == before


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bytes]] = []

    def fsync(handle: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(handle).st_mode), path.read_bytes()))

    old = path.read_bytes()
    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, b"new")
    assert seen == [(False, old), (True, b"new")]


def test_a_full_disk_keeps_the_old_file(path: Path) -> None:
    """The limit on file sizes fails a write in the middle, as a full disk does."""
    before = path.read_bytes()

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(EngramError, match=r"cannot be written .*; check the folder"):
            write_atomically(path, before + before)

    assert forked(write) == 0
    assert path.read_bytes() == before
    assert not temporary_files(path.parent)


def test_a_really_full_disk_keeps_the_old_file(path: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a small disk here; the test with a size limit stands in for it")
    try:
        target = disk / "a.safetensors"
        target.write_bytes(path.read_bytes())
        with pytest.raises(EngramError, match="No space left on device"):
            write_atomically(target, bytes(100_000))
        assert target.read_bytes() == path.read_bytes()
        assert not temporary_files(disk)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_cannot_be_written_is_a_sentence(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    (tmp_path / "folder.safetensors").mkdir()
    for target in (
        tmp_path / "missing" / "a.safetensors",
        path / "a.safetensors",
        tmp_path / "folder.safetensors",
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(EngramError, match=re.escape(str(target)) + " cannot be written"):
            write_atomically(target, data)

    def write() -> None:
        os.chmod(tmp_path, 0o500)
        if os.geteuid() == 0:
            os.setuid(65534)  # whom permissions hold back
        with pytest.raises(EngramError, match="Permission denied"):
            write_atomically(path, b"")

    assert forked(write) == 0
    os.chmod(tmp_path, 0o700)
    assert path.read_bytes() == data
    assert not temporary_files(tmp_path)


def test_saving_through_a_link_keeps_the_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"


def test_a_path_is_checked_before_work_is_spent(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.bin")
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    with pytest.raises(EngramError, match=r"cannot be written .*; choose another -o"):
        check_writable(tmp_path / "missing" / "new.bin", other="-o")
    check_writable(tmp_path / "made" / "new.bin", parents=True)
    assert (tmp_path / "made").is_dir()
    with pytest.raises(EngramError, match="it is a folder"):
        check_writable(tmp_path / "made")
    with pytest.raises(EngramError, match="it is not a regular file"):
        check_writable("/dev/null")


def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_renamable(tmp_path)
    check_renamable(tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngramError, match="is the current folder and cannot be replaced"):
        check_renamable(tmp_path)


def test_a_folder_is_replaced_with_all_that_is_in_it(tmp_path: Path) -> None:
    old = tmp_path / "folder"
    old.mkdir()
    (old / "old.txt").write_text("old")
    with replaced_folder(old) as new:
        (new / "new.txt").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in old.iterdir()] == ["new.txt"]


def test_a_folder_that_could_not_be_filled_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old.txt").write_text("old")
    with (
        pytest.raises(EngramError, match="cannot be written"),
        replaced_folder(tmp_path / "folder") as new,
    ):
        (new / "missing" / "new.txt").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "old.txt"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "demo.txt").touch()
    check_replaceable(tmp_path, "demo", {"demo.txt"})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    for known in ((), {"demo.txt", "notes"}):
        with pytest.raises(EngramError, match=r"mine.txt"):
            check_replaceable(tmp_path, "demo", known)


def test_a_folder_is_made_with_those_above_it_or_refused(path: Path) -> None:
    make_folder(path.parent / "deep" / "er")
    make_folder(path.parent / "deep" / "er")
    with pytest.raises(EngramError, match=r"cannot be created \(Not a directory\); choose another"):
        make_folder(path / "below")


def test_only_regular_files_are_opened_to_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    for path in (tmp_path / "pipe", tmp_path / "self", "/dev/zero", tmp_path):
        with pytest.raises(OSError):  # noqa: PT011
            open_regular(path)
    (tmp_path / "file").write_bytes(b"content")
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"content"
