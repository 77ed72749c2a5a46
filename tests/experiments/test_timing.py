"""Times are compared fairly: cases take turns, and a row says how much of it was measured."""

import math

import pytest

from engram.experiments.timing import Case, compare, describe_machine, exponent, machine, quartiles


def test_an_exponent_is_found_again() -> None:
    xs = [1, 2, 5, 10, 50, 200]
    assert exponent(xs, [3 * x**1.7 for x in xs]) == pytest.approx(1.7)
    assert exponent(xs, [4.0] * len(xs)) == pytest.approx(0)
    noisy = [x**2 * math.exp(0.01 * (-1) ** i) for i, x in enumerate(xs)]
    assert exponent(xs, noisy) == pytest.approx(2, abs=0.02)


def test_cases_take_turns_and_are_scaled() -> None:
    order: list[str] = []
    cases = {
        "a": Case(lambda: order.append("a")),
        "b": Case(lambda: order.append("b"), runs=2, of=10),
    }
    messages: list[str] = []
    found = compare(cases, seconds=0, least=2, say=messages.append)
    assert order == ["a", "b", *["a", "b", "b"] * 2]
    assert cases["b"].scale == 5
    assert found["a"].ratio == found["a"].low == found["a"].high == 1
    assert found["b"].rounds == len(messages) == 2
    assert found["b"].low <= found["b"].ratio <= found["b"].high


def test_rounds_end_at_the_most() -> None:
    assert compare({"a": Case(lambda: None)}, seconds=60, most=4)["a"].rounds == 4


def test_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


def test_a_case_of_several_short_calls_counts_as_one() -> None:
    assert Case(lambda: None, runs=4, of=1).scale == 0.25
    assert Case(lambda: None, runs=4).scale == 1


def test_the_machine_is_described_in_a_sentence() -> None:
    about = machine()
    text = describe_machine({**about, "processor": "Some CPU", "memory_gb": None, "cores": 3})
    assert text.startswith(f"Some CPU (3 cores, {about['system']}), torch {about['torch']} with ")
    assert "GB" not in text
