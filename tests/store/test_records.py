"""What is known about a task is known about its weights: it goes when they change."""

from dataclasses import replace
from pathlib import Path

from engram.store.format import read_engram
from engram.store.records import Records


def test_a_record_is_restored_for_the_same_content_alone(path: Path) -> None:
    known = read_engram(path)
    records = Records()
    records.remember(known)
    assert known.metrics == {"accuracy": 0.5}
    bare = replace(known, metrics={}, created="")
    assert records.restore(bare).metrics == {"accuracy": 0.5}
    assert records.restore(bare).created == known.created
    changed = replace(bare, tensors={name: t + 1 for name, t in bare.tensors.items()})
    assert records.restore(changed).metrics == {}
    assert records.restore(bare.renamed("b")).metrics == {}
