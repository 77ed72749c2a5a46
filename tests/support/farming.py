"""Files of jobs that train in a moment, in the folder of the fixture `work`."""

from pathlib import Path

from engram.farm.events import Event
from engram.farm.jobs import FarmJob, read_jobs
from engram.farm.plan import Plan, make_plan
from engram.farm.work import train_job

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


def plan_of(text: str, overwrite: bool = False, defaults: str = DEFAULTS) -> Plan:
    return make_plan(jobs_of(text, overwrite, defaults), print)


class Inline:
    """A runner that trains in this process, one job after another."""

    slots = 1

    def __init__(self) -> None:
        self._said: list[Event] = []

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def start(self, job: FarmJob, group: str = "") -> None:
        self._said.append(train_job(job, self._said.append))

    def events(self, seconds: float) -> list[Event]:
        said, self._said = self._said, []
        return said
