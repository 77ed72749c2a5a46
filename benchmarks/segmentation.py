"""Outlines, breed and cat or dog of pets with the real ViT-Ti/16: three kinds of answer, one pass.

    python benchmarks/segmentation.py [--work FOLDER] [--quick]

Fits, each as an engram of its own, `outline` (segmentation from the trimaps; the border, value 3,
is ignored), `breed` (classification, the default recipe) and `species` (multilabel: a column for
cat and one for dog), and the linear probe that outlines are compared with (regime `head`). Then
evaluates the three together, and compares every answer with what it is alone. Rates and lengths
were chosen on the validation split. The cache is empty at first and shared: `outline` fills what it
needs, `species` reads what `breed` stored. Targets, on the test split: a mean IoU above 0.93, with
fit and cache in under ten minutes on two idle cores, and above the probe; together as alone within
1e-5. Needs the assets folder (../shared, or ENGRAM_ASSETS).

With --work, what is done stays in that folder, and the same command goes on after an interruption
(the seconds of what was interrupted are then those of its last part). --quick takes a few
photographs and steps, to see that all of it runs: its figures say nothing, and are printed but not
kept.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import engram
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.evaluate import preprocessing_of
from engram.util.files import write_atomically
from photographs import ASSETS, TRUNK, run
from reporting import report

PETS, MASKS = ASSETS / "data" / "pets", ASSETS / "data" / "pets_masks"
OUTLINE = ("--kind", "segmentation", "--classes", "pet=1,background=2", "--ignore", "3")
SHORT = ("--epochs", "10", "--batch", "32", "--lr", "0.001")
SETTINGS: dict[str, tuple[str, ...]] = {
    "outline": (*OUTLINE, *SHORT),
    "breed": (),
    "species": ("--kind", "multilabel", "--label", "cat,dog", "--epochs", "10"),
    "probe": (*OUTLINE, *SHORT, "--regime", "head"),
}
SCORES = {"outline": "miou", "breed": "accuracy", "species": "map"}


class Bench:
    """Commands in a folder that keeps what each of them said."""

    def __init__(self, work: Path, quick: bool) -> None:
        work = work / "quick" if quick else work
        self.work, self.quick = work, quick
        self.pets, self.masks = (work / "pets", work / "masks") if quick else (PETS, MASKS)
        work.mkdir(parents=True, exist_ok=True)
        if quick:
            self.few()
        self.data = {
            "outline": f"{self.pets}::{self.masks}",
            "breed": str(self.pets),
            "species": str(self.species()),
        }

    def few(self) -> None:
        """Links to the first photographs of each class, and to their masks."""
        for photo in sorted(PETS.glob("*/*/*")):
            place = photo.relative_to(PETS)
            target = self.pets / place
            target.parent.mkdir(parents=True, exist_ok=True)
            there = len(list(target.parent.iterdir()))
            if not target.exists() and there < (2 if place.parts[0] == "train" else 1):
                target.symlink_to(photo)
                mask = (MASKS / place).with_suffix(".png")
                (self.masks / place).parent.mkdir(parents=True, exist_ok=True)
                (self.masks / place).with_suffix(".png").symlink_to(mask)

    def species(self) -> Path:
        """A table of all photographs; the files of cats begin with a capital letter."""
        path = self.work / "species.csv"
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["path", "split", "cat", "dog"])
            for photo in sorted(self.pets.glob("*/*/*")):
                cat = int(photo.name[0].isupper())
                rows.writerow([photo, photo.parts[-3], cat, 1 - cat])
        return path

    def file(self, name: str) -> Path:
        return self.work / f"{name}.safetensors"

    def run(self, step: str, *arguments: str | Path) -> dict[str, Any]:
        """What a command says, and how long it took; of a step that is done, from disk."""
        record = self.work / f"{step}.json"
        if record.exists():
            print(f"{step}: done before, {record} has it", file=sys.stderr)
        else:
            print(f"{step}: engram {' '.join(map(str, arguments))}", file=sys.stderr, flush=True)
            began = time.perf_counter()
            document = run(*arguments, cache=self.work / "cache")
            seconds = time.perf_counter() - began
            document["seconds_of_command"] = seconds
            write_atomically(record, json.dumps(document, indent=1).encode())
            print(f"{step}: {seconds:.0f} s", file=sys.stderr, flush=True)
        answer: dict[str, Any] = json.loads(record.read_text())
        return answer

    def fit(self, name: str) -> dict[str, Any]:
        data = self.data.get(name, self.data["outline"])
        steps = ("--steps", "4") if self.quick else ()
        return self.run(
            name,
            *("fit", data, "--task", name, "--backbone", TRUNK, "-o", self.file(name), "--test"),
            *SETTINGS[name],
            *steps,
            *("--resume", "--overwrite"),
        )


def differences(files: list[Path], photos: list[Path]) -> dict[str, tuple[float, float]]:
    """By task, between its outputs together with the others and alone: the largest difference, and
    the same as a part of the largest output."""
    trunk = engram.load_trunk(TRUNK)
    together = engram.MemoryViT(trunk).eval()
    for file in files:
        together.attach(file)
    preprocessing = preprocessing_of(together)
    views = [torch.from_numpy(evaluation_view(photo, preprocessing)) for photo in photos]
    pixels = normalise(torch.stack(views), preprocessing)
    found = {}
    with torch.no_grad():
        outputs, exact = together(pixels), together(pixels, exact=True)
        assert torch.equal(exact["base"], trunk(pixels)), "base changed"
        for name, file in zip(together.tasks, files, strict=True):
            alone = engram.MemoryViT(trunk).eval()
            alone.attach(file)
            assert torch.equal(alone(pixels, exact=True)[name], exact[name]), f"{name} changed"
            most = float((alone(pixels)[name] - outputs[name]).abs().max())
            found[name] = (most, most / float(outputs[name].abs().max()))
    return found


def measure(bench: Bench) -> list[str]:
    fitted = {name: bench.fit(name) for name in SETTINGS}
    files = [bench.file(name) for name in SCORES]
    pairs = [word for name in SCORES for word in ("--data", f"{name}={bench.data[name]}")]
    both = bench.run("together", "eval", *files, *pairs, "--backbone", TRUNK)
    lines = [
        "| task | kind | on the test split | seconds, all | alone = together |",
        "|---|---|---|---|---|",
    ]
    for name, score in SCORES.items():
        spec = engram.inspect(bench.file(name)).spec
        shown = f"{spec.does.title} {spec.does.shown(both[name][score])}"
        if name == "outline":
            shown += f", pixel accuracy {both[name]['pixel_accuracy']:.4f}"
        if name == "species":
            shown += f", macro F1 {both[name]['macro_f1']:.4f}"
        same = abs(both[name][score] - fitted[name]["metrics"]["test"][score]) < 1e-5
        seconds = fitted[name]["seconds_of_command"]
        lines.append(
            f"| {name} | {spec.kind} | {shown} | {seconds:.0f} | {'yes' if same else 'NO'} |"
        )
    photos = sorted((bench.pets / "test").glob("*/*"))[:: 4 if bench.quick else 23]
    print(f"differences: {len(photos)} photographs", file=sys.stderr, flush=True)
    apart = differences(files, photos)
    told = "; ".join(f"{n} {most:.1e} ({part:.1e})" for n, (most, part) in apart.items())
    return [
        *lines,
        "",
        f"The linear probe on the frozen patches (`--regime head`, the same recipe): mean IoU "
        f"{fitted['probe']['metrics']['test']['miou']:.4f}. Target: above 0.93, and above the "
        "probe.",
        "",
        f"Largest difference between an output together with the others and alone, over "
        f"{len(photos)} photographs (as a part of the task's largest output): {told}. Target: "
        "1e-5. With `exact=True` all of them, and the ViT's own answers, are the same bit for bit.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, help="keep what is done here, and go on from it")
    parser.add_argument("--quick", action="store_true", help="a look that proves nothing")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        lines = measure(Bench((asked.work or Path(temporary)).resolve(), asked.quick))
    if asked.quick:
        print("\n".join(lines))
    else:
        title = "Outline, breed and species of pets in one pass (ViT-Ti/16, masked)"
        report("segmentation", title, lines)


if __name__ == "__main__":
    main()
