"""Drift: the tests agree with scipy's, noise is none, and a shift is found and sized."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from engram.curation.drift import (
    changed_answers,
    chi_squared,
    compare,
    holm,
    kolmogorov_smirnov,
    least_familiar,
    read_answers,
)
from engram.errors import EngramError
from engram.inference.bulk.table_formats import table_format


@pytest.mark.parametrize(
    ("first", "second", "shift"), [(30, 40, 0.0), (400, 250, 0.1), (90, 2000, 1)]
)
def test_kolmogorov_smirnov_agrees_with_scipy(first: int, second: int, shift: float) -> None:
    random = np.random.default_rng(0)
    one, other = random.normal(size=first), random.normal(shift, size=second)
    other[:5] = one[:5]  # ties
    size, p = kolmogorov_smirnov(one, other)
    expected = stats.ks_2samp(one, other, method="exact")
    assert size == pytest.approx(expected.statistic)
    assert p == pytest.approx(expected.pvalue, rel=0.15, abs=1e-9)


def test_chi_squared_agrees_with_scipy() -> None:
    one, other = np.array([50.0, 30, 20, 60]), np.array([40.0, 45, 25, 90])
    expected = stats.chi2_contingency(np.stack([one, other]), correction=False)
    assert chi_squared(one, other) == pytest.approx((expected.statistic, expected.pvalue))


def test_rare_classes_are_tested_as_one() -> None:
    one, other = np.array([100.0, 100, 1, 2, 3]), np.array([100.0, 100, 3, 2, 1])
    expected = stats.chi2_contingency([[100, 100, 6], [100, 100, 6]], correction=False)
    assert chi_squared(one, other) == pytest.approx((expected.statistic, expected.pvalue))
    assert chi_squared(np.array([9.0]), np.array([4.0])) == (0.0, 1.0)


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def rows(
    images: int, *, shift: float = 0.0, roses: float = 0.5, seed: int = 0, prefix: str = ""
) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    found = []
    for i in range(images):
        best = "rose" if random.random() < roses else "tulip"
        other = "tulip" if best == "rose" else "rose"
        sure = random.uniform(0.5, 1)
        found.append({
            "image": f"{prefix}{i}.png",
            "flowers": best, "flowers.probability": sure,
            "flowers.top": [{"class": best, "probability": sure},
                        {"class": other, "probability": 1 - sure}],
            "flowers.familiarity": random.normal(1 - shift, 0.5),
        })  # fmt: skip
    return found


def table(path: Path, rows: Sequence[dict[str, Any]]) -> Any:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_answers(path)


def test_other_images_of_the_same_kind_are_no_drift_however_many(tmp_path: Path) -> None:
    before = table(tmp_path / "a.jsonl", rows(20_000))
    now = table(tmp_path / "b.jsonl", rows(20_000, roses=0.53, shift=0.03, seed=1))
    found = compare(before, now, 0.1)
    assert [one.name for one in found.comparisons] == ["familiarity", "confidence", "answers"]
    assert min(one.corrected for one in found.comparisons) < 0.01  # significant, and tiny
    assert found.tasks == []


def test_a_shift_of_familiarity_or_of_answers_is_drift(tmp_path: Path) -> None:
    before = table(tmp_path / "a.jsonl", rows(300))
    now = table(tmp_path / "b.jsonl", rows(300, shift=1, roses=0.9, seed=1))
    found = compare(before, now, 0.1)
    drifts = {one.name: one.drifts(0.1) for one in found.comparisons}
    assert drifts == {"familiarity": True, "confidence": False, "answers": True}
    answers = found.comparisons[-1]
    assert answers.size == pytest.approx(0.4, abs=0.08)
    assert "rose" in answers.change
    assert found.tasks == ["flowers"]
    assert compare(before, now, 0.9).tasks == []


def test_images_that_changed_and_unfamiliar_ones_are_found(tmp_path: Path) -> None:
    before, now = rows(20), rows(20)
    now[4] |= {"flowers": "weed", "flowers.probability": 0.9}
    now[9]["flowers.familiarity"] = -7.0
    tables = [table(tmp_path / f"{i}.jsonl", one) for i, one in enumerate((before, now))]
    ((image, _, answer),) = changed_answers(*(one.tasks["flowers"] for one in tables))
    assert (image, answer.labels) == ("4.png", ("weed",))
    assert least_familiar(tables[1].tasks["flowers"])[0][0] == "9.png"


def test_every_format_of_predict_gives_the_same_comparison(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    number = {"class": "text", "probability": "number"}
    columns: dict[str, Any] = {"image": "text", "flowers": "text", "flowers.probability": "number",
                               "flowers.top": number, "flowers.familiarity": "number",
                               "tags": "texts", "tags.top": {**number, "present": "truth"},
                               "age": "number", "size.x": "number", "size.y": "number",
                               "error": "text"}  # fmt: skip
    own = rows(20)
    for i, row in enumerate(own):
        present = ["wet"] if i % 2 else []
        row |= {"tags": present, "age": 3.5, "size.x": 1.0, "size.y": float(i)}
        row["tags.top"] = [{"class": "wet", "probability": 0.25, "present": bool(i % 2)}]
    own.append({"image": "broken.png", "error": "broken.png: it is no image"})
    for suffix in (".jsonl", ".parquet", ".csv"):
        table_format(suffix, columns).write(tmp_path / f"a{suffix}", own)
    (tmp_path / "parts").mkdir()
    for i, part in enumerate((own[:12], own[12:])):
        table_format(".parquet", columns).write(tmp_path / "parts" / f"part-{i}.parquet", part)
    expected = read_answers(tmp_path / "a.jsonl")
    assert set(expected.tasks) == {"flowers", "tags", "age", "size"}
    assert expected.tasks["size"]["3.png"].numbers == {"x": 1.0, "y": 3.0}
    assert expected.tasks["tags"]["3.png"][:2] == (("wet",), 0.25)
    assert expected.tasks["tags"]["2.png"].labels == ()
    for name in ("a.parquet", "a.csv", "parts"):
        found = read_answers(tmp_path / name)
        assert (found.rows, found.unreadable, found.several) == (21, 1, {"tags"})
        assert found.tasks == expected.tasks


def test_other_kinds_are_compared_by_what_they_answer(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def kinds(age: float, present: float) -> list[dict[str, Any]]:
        return [
            {
                "image": f"{i}.png",
                "age": random.normal(age),
                "tags": [c for c, share in (("wet", 0.5), ("red", present))
                         if random.random() < share],
                "tags.top": [{"class": "wet", "probability": 0.5, "present": True}],
                "pixels": "sky",
                "pixels.share": 0.7,
                "pixels.top": [{"class": "sky", "share": 0.7}],
            }
            for i in range(400)
        ]  # fmt: skip

    before = table(tmp_path / "a.jsonl", kinds(30, 0.1))
    now = table(tmp_path / "b.jsonl", kinds(33, 0.6))
    found = compare(before, now, 0.1)
    assert [(c.task, c.name) for c in found.comparisons] == [
        ("age", "age"),
        ("tags", "confidence"),
        ("tags", "answers"),
        ("pixels", "answers"),
    ]
    assert found.tasks == ["age", "tags"]
    tags = found.comparisons[2]
    assert tags.size == pytest.approx(0.5, abs=0.08)


def test_what_is_no_table_of_answers_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "wrong.jsonl").write_text('{"other": 1}\n')
    (tmp_path / "wrong.txt").write_text("1")
    (tmp_path / "errors.jsonl").write_text('{"image": "a.png", "error": "bad"}\n')
    expected = {
        "gone.csv": "no",
        "empty.jsonl": "no rows",
        "wrong.jsonl": "predict --out",
        "wrong.txt": "predict --out",
        "errors.jsonl": "no answers",
    }
    for name, words in expected.items():
        with pytest.raises(EngramError, match=words):
            read_answers(tmp_path / name)
    one = table(tmp_path / "a.jsonl", rows(5))
    other = table(tmp_path / "b.jsonl", [{"image": "1", "cars": 4}])
    with pytest.raises(EngramError, match="no task in common"):
        compare(one, other, 0.1)
