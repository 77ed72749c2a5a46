"""`engram` commands as processes of their own, forked from one that has torch loaded already."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_NURSERY = """
import gc, json, os, resource, sys
import accelerate, torch, torch._dynamo, matplotlib.figure, torch.utils.tensorboard
import rich.progress, rich.table, sklearn.datasets
import engram.report.run, engram.serve.app, uvicorn
from engram.cli.main import main
# What is loaded now stays until a child exits: looking through it for garbage takes seconds.
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        code = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
        print(code, flush=True)
        continue
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        for number, name in enumerate(("/dev/null", job["out"], job["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        if job["fsize"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["fsize"], job["fsize"]))
        sys.exit(main(job["arguments"]))
    print(child, flush=True)
"""


@dataclass
class Running:
    """An `engram` command in a process of its own; ended, it has a code, stdout and stderr."""

    nursery: "Nursery"
    pid: int
    files: tuple[Path, Path]
    code: int | None = None

    def wait(self) -> "Running":
        if self.code is None:
            self.code = int(self.nursery.ask({"wait": self.pid}))
        return self

    def signal_when(self, number: int, ready: Callable[[], bool], wait: bool = True) -> "Running":
        """Send a signal to its whole group, as a terminal does, as soon as `ready`."""
        while not ready():
            assert Path(f"/proc/{self.pid}/stat").read_text().split()[2] != "Z", self.stderr
            time.sleep(0.002)
        os.killpg(self.pid, number)
        return self.wait() if wait else self

    @property
    def stdout(self) -> str:
        return self.files[0].read_text()

    @property
    def stderr(self) -> str:
        return self.files[1].read_text()


class Nursery:
    """Starts `engram` commands by forking a process that has torch loaded and has run nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, job: dict[str, object]) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def start(
        self,
        *arguments: object,
        cwd: Path | None = None,
        fsize: int = 0,
        stdout: Path | None = None,
        **env: object,
    ) -> Running:
        self.count += 1
        out, err = (self.folder / f"{self.count}.{name}" for name in ("out", "err"))
        out = stdout or out
        job = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd or self.folder),
            "env": {
                "ENGRAM_CACHE": os.environ.get("ENGRAM_CACHE", str(self.folder / "cache")),
                **{name: str(value) for name, value in env.items()},
            },
            "out": str(out),
            "err": str(err),
            "fsize": fsize,
        }
        return Running(self, int(self.ask(job)), (out, err))

    def run(self, *arguments: object, cwd: Path | None = None, fsize: int = 0) -> Running:
        return self.start(*arguments, cwd=cwd, fsize=fsize).wait()
