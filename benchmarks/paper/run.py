"""Work through the list of runs, the most valuable first; stop it and start it as you like.

OMP_NUM_THREADS=1 python benchmarks/paper/run.py            one process; start one for each core
python benchmarks/paper/run.py --list                        what is done and what is not
python benchmarks/paper/run.py --only fashion                names that contain this
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import sets
import torch
from plan import Job, jobs_for, queue
from runs import Setting, claimed

from engram.errors import EngramError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the list and run nothing")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--most", type=int, default=0, help="stop after this many; 0: at the end")
    arguments = parser.parse_args()
    jobs = [job for job in queue() if arguments.only in job.name]
    if arguments.list:
        for job in jobs:
            print("done   " if not job.missing() else "missing", job.name)
        print(f"{sum(not job.missing() for job in jobs)} of {len(jobs)} done")
        return
    work_through(jobs, arguments.most)


def work_through(jobs: Sequence[Job], most: int = 0) -> None:
    """Do what is missing, in order, beside others who do the same; `most` jobs, if given."""
    if not sets.TRUNK.exists():
        sys.exit(f"There is no {sets.TRUNK}; set ENGRAM_ASSETS to the folder of weights and data.")
    torch.set_num_threads(1)
    done = 0
    while todo := [job for job in jobs if job.missing()]:
        if most and done == most:
            return
        for job in todo:
            if not job.missing() or not job.ready():
                continue
            with claimed(job.name.replace(" ", "-")) as ours:
                if ours and job.missing():
                    print(time.strftime("%H:%M:%S"), job.name, flush=True)
                    job.work(lambda text: print("        ", text, flush=True))
                    done += 1
                    break  # what comes first may be ready by now
        else:
            time.sleep(5)  # the rest is in other hands, or waits for what is


def script(wanted: Sequence[Job] | Sequence[Setting], table: Callable[[], list[str]]) -> None:
    """One experiment: run what is missing of it (with --table, nothing), and print its table."""
    if "--table" not in sys.argv:
        settings = [one for one in wanted if isinstance(one, Setting)]
        others = [one for one in wanted if not isinstance(one, Setting)]
        work_through([*others, *jobs_for(settings)])
    print("\n".join(table()))


if __name__ == "__main__":
    try:
        main()
    except EngramError as error:
        sys.exit(str(error))
