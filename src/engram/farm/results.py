"""The engrams of a farm's jobs, in bundles."""

from __future__ import annotations

from engram.farm.jobs import FarmJob
from engram.store.bundles import (
    Bundle,
    BundleChanged,
    compose,
    is_bundle,
    read_bundle,
    update_bundle,
)
from engram.store.fitting import in_order
from engram.store.format import read_engram
from engram.store.remote import single_engram_path
from engram.train.options import named

_TRIES = 5  # to change a bundle that others change at the same time


def add_to_bundle(job: FarmJob) -> None:
    """Put the engram of a job, and those that it extends, into its bundle, next to the others.

    A task of the same name is replaced; `make_plan` has checked that it may be.
    """
    extended = [single_engram_path(named(text)[1]) for text in job.extends]
    if not is_bundle(job.bundle):
        compose([*extended, job.out], job.bundle)
        return
    mine = [(str(path), read_engram(path)) for path in (*extended, job.out)]
    names = {engram.spec.name for _, engram in mine}
    for attempt in range(_TRIES):
        old = read_bundle(job.bundle)
        others = [(e.file_name, e) for e in old.engrams if e.spec.name not in names]
        new = Bundle(job.bundle, in_order([*others, *mine]))
        if new.manifest() == old.manifest():
            return
        try:
            update_bundle(old, new)
            return
        except BundleChanged:
            if attempt + 1 == _TRIES:
                raise
