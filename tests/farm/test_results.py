"""A job's engram goes into its bundle, with those that it extends, beside those that are there."""

from pathlib import Path

from tests.support.farming import jobs_of

import engram
from engram.farm.results import add_to_bundle
from engram.store.bundles import read_bundle


def tasks(folder: str) -> list[str]:
    return [one.spec.name for one in read_bundle(folder).engrams]


def test_bundles_grow_and_a_task_that_was_trained_again_is_replaced(work: Path) -> None:
    first, second = jobs_of(
        '[jobs.a]\nbundle = "garden"\n'
        '[jobs.b]\nbundle = "garden"\nextends = ["old=old.safetensors"]\n'
    )
    model = engram.MemoryViT(engram.load_trunk("vit"))
    first.out.parent.mkdir()
    model.add_task("a", 3, 1, seed=0)
    model.save("a", first.out)
    add_to_bundle(first)
    assert tasks("garden") == ["a"]
    model.attach("old.safetensors")
    model.add_task("b", 3, 1, extends=["old"])
    model.save("b", second.out)
    add_to_bundle(second)
    assert tasks("garden") == ["a", "old", "b"]
    model.detach("a")
    model.add_task("a", 3, 2, seed=1)
    model.save("a", first.out)
    add_to_bundle(first)
    add_to_bundle(first)  # a farm that runs again
    assert sorted(tasks("garden")) == ["a", "b", "old"]
    assert engram.inspect("garden/a.safetensors").content == engram.inspect(first.out).content
