"""`engram` commands as processes of their own, forked from one that has torch loaded already."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.runs import Fact
from tests.support.waiting import wait_until

_NURSERY = """
import atexit, contextlib, gc, json, os, pathlib, pickle, resource, sys, threading, time
import torch, torch._dynamo, matplotlib.figure, torch.utils.tensorboard
import rich.progress, rich.table, sklearn.datasets
import engram.report.run_page, engram.serve.app, uvicorn
import engram.curation.check, engram.train.backbone, engram.train.job, engram.train.opening
from engram.cli.main import _commands, main
from tests.support.runs import hold_when
_commands()  # made once, and not in every child
# What is loaded now stays until a child exits: looking through it for garbage takes seconds.
gc.freeze()
os.fsync = lambda handle: None  # as in tests/conftest.py
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
        if job["nofile"]:
            resource.setrlimit(resource.RLIMIT_NOFILE, job["nofile"])
        exec(job["before"], {})
        if job["hold"]:
            hold_when(pickle.loads(bytes.fromhex(job["hold"])), pathlib.Path(job["go"]))
        code = main(job["arguments"])
        # All that an end of Python does, but for taking every module apart, which takes longest.
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    while os.getpgid(child) != child:  # until then it has no group that a signal could reach
        time.sleep(0.001)
    print(child, flush=True)
"""


@dataclass
class Running:
    """An `engram` command in a process of its own; ended, it has a code, stdout and stderr."""

    nursery: "Nursery"
    pid: int
    files: tuple[Path, Path]
    go: Path
    code: int | None = None

    def wait(self) -> "Running":
        if self.code is None:
            self.code = int(self.nursery.ask({"wait": self.pid}))
        return self

    def signal_when(self, number: int, ready: Callable[[], bool], wait: bool = True) -> "Running":
        """Send a signal to its whole group, as a terminal does, as soon as `ready`."""
        wait_until(lambda: ready() or self.ended, lambda: self.stderr)
        assert not self.ended, self.stderr
        os.killpg(self.pid, number)
        self.let_go()
        return self.wait() if wait else self

    def let_go(self) -> None:
        """Let it go on where it was held."""
        self.go.touch()

    @property
    def ended(self) -> bool:
        if self.code is not None:
            return True
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

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
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
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
        nofile: tuple[int, int] | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
        hold: Fact | None = None,
        before: str = "",
        **env: object,
    ) -> Running:
        """Start a command, after the Python code `before` in its process.

        With `hold`, it waits a little after this fact until it is let go.
        """
        self.count += 1
        out, err, go = (self.folder / f"{self.count}.{name}" for name in ("out", "err", "go"))
        out, err = stdout or out, stderr or err
        err.touch()  # whoever waits for what it says may be earlier
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
            "nofile": nofile,
            "hold": pickle.dumps(hold.later).hex() if hold else "",
            "go": str(go),
            "before": before,
        }
        return Running(self, int(self.ask(job)), (out, err), go)

    def run(self, *arguments: object, **options: Any) -> Running:
        return self.start(*arguments, **options).wait()
