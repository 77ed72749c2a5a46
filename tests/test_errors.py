"""Errors: one base for mistakes, a worker that the system ended, and the names of settings."""

import warnings

import pytest

from engram import EngramError
from engram.errors import Interrupted, Notice, flag, is_lost_worker, naming_flags


def test_a_stopped_run_is_caught_where_mistakes_are() -> None:
    with pytest.raises(EngramError, match="Stopped at step 3"):
        raise Interrupted("Stopped at step 3.")


def test_a_notice_is_no_error() -> None:
    with pytest.warns(Notice, match="not used"):
        warnings.warn("The cache is not used.", Notice, stacklevel=1)
    assert not issubclass(Notice, EngramError)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), True),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("DataLoader worker"), False),
    ],
)
def test_a_lost_worker_is_known_by_what_torch_says(error: Exception, lost: bool) -> None:
    assert is_lost_worker(error) == lost


def test_a_setting_is_named_as_the_user_writes_it() -> None:
    cases = [("max_bad", None), ("max_bad", 0.1), ("resume", True), ("out", None), ("cache", "on")]
    assert [flag(*case) for case in cases] == [
        "max_bad", "max_bad=0.1", "resume=True", "out", "cache='on'",
    ]  # fmt: skip
    with naming_flags():
        assert [flag(*case) for case in cases] == [
            "--max-bad", "--max-bad 0.1", "--resume", "-o", "--cache on",
        ]  # fmt: skip
    assert flag("max_bad") == "max_bad"
