"""Text for people: short, on one line, and never in the way of printing."""

import pytest

from engram.util.text import (
    counted,
    duration,
    first_line,
    join_names,
    printable,
    storage,
    summarise_names,
    utf8,
    visible,
    without_folder,
    words,
)


def test_names_are_summarised() -> None:
    assert summarise_names(["rose"]) == "1 class (rose)"
    assert summarise_names(list("abcdef")) == "6 classes (a, b, c, d, e, …)"
    assert summarise_names(["x", "y"], nouns=("value", "values")) == "2 values (x, y)"


def test_numbers_have_the_noun_that_fits() -> None:
    assert (counted(1, "image"), counted(0, "image")) == ("1 image", "0 images")
    assert counted(2000, "class", "classes") == "2,000 classes"


def test_what_an_exception_says_is_one_line_of_a_sentence() -> None:
    assert first_line(ValueError("\nIt broke.\nAgain.")) == "It broke"
    assert first_line(ValueError()) == "ValueError"


def test_times_and_sizes_are_short() -> None:
    assert [duration(s) for s in (7.6, 125, 4350)] == ["8 s", "2 min 5 s", "1 h 12 min"]
    assert [storage(b) for b in (4e3, 7.4e8, 1.62e9, 4e10)] == ["4 kB", "740 MB", "1.6 GB", "40 GB"]


def test_names_are_joined() -> None:
    assert join_names(["a", "b"]) == "a, b"
    assert join_names(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"


@pytest.mark.parametrize("text", ["two\nlines", "bell\a", "\u202eright to left", "\ud800"])
def test_what_is_printed_is_one_line_without_control_characters(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text)) == len(text)


def test_what_is_printed_has_an_end() -> None:
    assert printable("x" * 500) == "x" * 119 + "…"
    assert printable("x" * 120) == "x" * 120


def test_invisible_characters_are_shown_as_escapes() -> None:
    assert visible("café 世界 🌷") == "café 世界 🌷"
    assert visible("a\x1b[2J\n\u202e\x9b\x7f\ud800") == r"a\x1b[2J\n\u202e\x9b\x7f\ud800"


def test_only_absolute_paths_lose_their_folder() -> None:
    assert without_folder("/home/ann/vit/") == "vit"
    assert without_folder("google/vit-base-patch32-224-in21k") == (
        "google/vit-base-patch32-224-in21k"
    )


def test_bytes_that_are_no_utf8_are_escaped() -> None:
    assert utf8("café") == "café".encode()
    assert utf8("caf\udce9") == b"caf\\udce9"


def test_names_are_split_at_commas() -> None:
    assert words("red, large") == ["red", "large"]
    assert words("") == []
