"""The engrams of a farm's jobs, in bundles, and how many attempts they took."""

from __future__ import annotations

import contextlib

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
from engram.train.run import run_folder
from engram.util.files import write_atomically

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


def attempts_of_training(job: FarmJob, attempts: int, finished_before: bool) -> int:
    """The attempts that a training took; its folder keeps them for a later farm.

    Args:
        job: A job whose engram is written.
        attempts: Those of this farm, which are one if it found the job finished.
        finished_before: Whether it was found finished.
    """
    kept = run_folder(job.out) / "attempts.txt"
    if finished_before and attempts == 1:
        with contextlib.suppress(OSError, ValueError):
            return int(kept.read_text(encoding="ascii"))
    write_atomically(kept, f"{attempts}\n".encode(), owner_only=True)
    return attempts
