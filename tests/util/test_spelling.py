"""Settings are flags at the command line and arguments in Python."""

from engram.util.spelling import spell, spelled_as_flags


def test_a_setting_is_named_as_the_user_writes_it() -> None:
    cases = [("max_bad", None), ("max_bad", 0.1), ("resume", True), ("out", None), ("cache", "on")]
    assert [spell(*case) for case in cases] == [
        "max_bad", "max_bad=0.1", "resume=True", "out", "cache='on'",
    ]  # fmt: skip
    with spelled_as_flags():
        assert [spell(*case) for case in cases] == [
            "--max-bad", "--max-bad 0.1", "--resume", "-o", "--cache on",
        ]  # fmt: skip
    assert spell("max_bad") == "max_bad"
