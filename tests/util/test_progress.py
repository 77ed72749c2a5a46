"""Counting how far a piece of work is."""

from engram.util.progress import counter


def test_items_are_counted_from_a_beginning_that_is_shown() -> None:
    said: list[tuple[object, ...]] = []
    count = counter(lambda *given: said.append(given), "caching", 5, "1 GB", times=2)
    for _ in range(3):
        count(1)
    assert said == [("caching", done, 5, "1 GB") for done in (0, 2, 4, 5)]


def test_work_of_nothing_is_not_shown() -> None:
    said: list[tuple[object, ...]] = []
    counter(lambda *given: said.append(given), "caching", 0)
    assert said == []
