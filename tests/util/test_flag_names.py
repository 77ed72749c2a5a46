"""Settings are flags at the command line and arguments in Python."""

from engram.errors import flag, naming_flags


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
