"""A Dockerfile as its instructions, read the way a builder reads it."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """What comes after one FROM: instructions in order, names in capitals."""

    base: str
    instructions: list[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        return [text for found, text in self.instructions if found == name]

    def only(self, name: str) -> str:
        (text,) = self.all(name)
        return text

    def command(self, name: str) -> list[str]:
        """The exec form of ENTRYPOINT, CMD or HEALTHCHECK, whose options come first."""
        words: list[str] = json.loads(re.sub(r"^(--\S+\s+)*(CMD\s+)?", "", self.only(name)))
        return words

    @property
    def env(self) -> dict[str, str]:
        pairs = [pair for text in self.all("ENV") for pair in shlex.split(text)]
        return dict(pair.split("=", 1) for pair in pairs)

    @property
    def copied(self) -> list[str]:
        """What is copied from the folder that the image is built in."""
        copies = [shlex.split(text) for text in self.all("COPY") if not text.startswith("--from")]
        return [source for words in copies for source in words[:-1]]


def read_dockerfile(path: Path) -> list[Stage]:
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    stages: list[Stage] = []
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            stages.append(Stage(rest.split()[0], []))
        elif name:
            stages[-1].instructions.append((name, rest.strip()))
    return stages
