"""Files of jobs that train in a moment, in the folder of the fixture `work`."""

from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from typing import Any

from engram.cluster.farm import Farm
from engram.cluster.jobs import FarmJob, check_jobs, read_jobs
from engram.cluster.trainers import Trained, train_job

FOLDER = Path("jobs.farm")
DEFAULTS = """
[defaults]
data = "colours.npz"
backbone = "vit"
regime = "masked"
steps = 6
batch = 16
workers = 0
evaluations = 1
"""


def jobs_file(text: str, defaults: str = DEFAULTS) -> Path:
    path = Path("jobs.toml")
    path.write_text(defaults + text, encoding="utf-8")
    return path


def jobs_of(text: str, overwrite: bool = False, defaults: str = DEFAULTS) -> list[FarmJob]:
    return read_jobs(jobs_file(text, defaults), FOLDER, FOLDER / "bundle", overwrite)


def plan_of(text: str, overwrite: bool = False, defaults: str = DEFAULTS) -> list[FarmJob]:
    return check_jobs(jobs_of(text, overwrite, defaults), print)


class Inline:
    """Workers that train in this process, one job after another."""

    slots = 1

    def __init__(self) -> None:
        self.queue: Queue[Any] = Queue()

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def submit(self, job: FarmJob) -> Future[Trained]:
        future: Future[Trained] = Future()
        try:
            future.set_result((self.train(job), {}))
        except Exception as error:
            future.set_exception(error)
        return future

    def train(self, job: FarmJob) -> dict[str, Any]:
        return train_job(job, 1, self.queue)[0]


class Lines(list[str]):
    """What a farm says, line by line."""

    def __call__(self, statuses: object, text: str) -> None:
        if text:
            self.append(text)


def farm(
    plan: list[FarmJob], workers: Any = None, lines: Lines | None = None, retries: int = 1
) -> Farm:
    show = Lines() if lines is None else lines
    farm = Farm(plan, FOLDER, show, retries)
    farm.run(workers or Inline())
    return farm
