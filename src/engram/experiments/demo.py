"""The tour a newcomer runs first: three tasks, one frozen ViT, one pass, and proof of the promises.

Everything is real and made on the spot: scikit-learn's handwritten digits, two questions about
generated scenes, and the bundled trunk. Nothing is downloaded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from engram.data.datasets import Dataset, Splits, load, split_validation
from engram.data.scenes import scene_splits
from engram.images.decode import Pixels
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.evaluate import Answers
from engram.inference.load import load_model
from engram.memory import Memory, Stream, TrunkPass, forward_tasks, full_attention
from engram.model import MemoryViT
from engram.report.page import Section, TaskPart, costs_of, write_report
from engram.report.pieces import bars, paragraph, picture, table
from engram.store.bundles import compose
from engram.train.fit import fit
from engram.train.recipe import Recipe
from engram.train.result import Result
from engram.trunks.load import load_trunk
from engram.util.progress import Progress

T = TypeVar("T")

WHAT = "engram demo"


@dataclass(frozen=True)
class Size:
    """How much is learned: as much as two cores can in about a minute."""

    digits: int = 1400  # training images
    digits_epochs: int = 12
    scenes: int = 1600
    scenes_epochs: int = 10
    test: int = 400
    rounds: int = 15  # of the timing


@dataclass
class Tour:
    """Everything once: learn, compose, examine, ask, prove, time, and tell."""

    folder: Path  # where things are written now
    out: Path  # what the user calls it
    seed: int
    size: Size
    console: Console
    bars: Callable[[], AbstractContextManager[Progress]]

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        trunk = load_trunk("pico")
        self.model = MemoryViT(trunk)
        self.data: dict[str, Splits] = {}
        self.learned: dict[str, Result] = {}
        config = trunk.config
        self._title("One frozen ViT")
        self._say(
            f"pico is a small ViT ({config.depth} layers, width {config.width}, "
            f"{sum(p.numel() for p in trunk.parameters()):,} parameters) that knows the ten "
            f"classes of CIFAR-10: {', '.join(trunk.labels or ())}. It stays as it is."
        )
        self._title("Three tasks, each an engram: 5 memory cells a layer, a class token, a head")
        self._learn("digits", "handwritten digits", _digits(self.size, self.seed), ())
        for question, about, extends in (
            ("shape", "which shape a scene shows", ()),
            ("count", "how many of them; it extends shape", ("shape",)),
        ):
            splits = scene_splits(
                question,
                train=self.size.scenes,
                val=max(20, self.size.test // 2),
                test=self.size.test,
                seed=self.seed,
            )
            self._learn(question, about, splits, extends)

        self._compose()
        accuracies = self._examine()
        picture = self._ask()
        identical = self._prove()
        passes = self._time()
        unmasked = self._unmask()
        self.results: dict[str, Any] = {
            "what": WHAT,
            "seed": self.seed,
            "accuracies": accuracies,
            "base_identical": identical,
            "costs": {
                name: {**asdict(cost), "share": round(cost.share, 5)}
                for name, cost in costs_of(self.model).items()
            },
            "passes": passes,
            "without_mask": unmasked,
            "picture": picture,
        }
        self._report()
        self.results["seconds"] = round(time.perf_counter() - began, 1)
        self._end()
        return self.results

    # The steps

    def _learn(self, name: str, about: str, splits: Splits, extends: Sequence[str]) -> None:
        """Train a task, and say how good it became."""
        digits = name == "digits"
        epochs = self.size.digits_epochs if digits else self.size.scenes_epochs
        recipe = Recipe(  # a higher rate than usual, because there are few steps
            epochs=epochs,
            lr=3e-3,
            seed=self.seed,
            data_seed=self.seed,
            evaluations=8,
            workers=0,
        )
        task = self.model.add_task(name, splits.classes, 5, extends=extends, seed=self.seed)
        with self.bars() as progress:

            def told(what: str, done: int, total: int, note: str = "") -> None:
                progress(f"{name}: {what}", done, total, note)

            result = fit(self.model, name, splits, recipe, progress=told)
        self.data[name], self.learned[name] = splits, result
        path = self.folder / f"{name}.safetensors"
        self.model.save(name, path, metrics=dict(result.metrics), recipe=recipe.to_dict())
        parameters = sum(p.numel() for p in task.parameters())
        self._say(
            f"{name}: {about}. {len(splits['train']):,} pictures, {result.seconds:.0f} seconds, "
            f"{parameters:,} parameters, {path.stat().st_size / 1000:.0f} KB."
        )

    def _compose(self) -> None:
        """Put the files together, and go on with what is on disk."""
        paths = [self.folder / f"{name}.safetensors" for name in self.data]
        compose(paths, self.folder / "bundle")
        for path in paths:
            path.unlink()
        self.model = load_model(self.folder / "bundle").eval()
        self._title("Composed")
        self._say(f"{self.out}/bundle holds all three; nobody had to train again.")

    def _examine(self) -> dict[str, float]:
        """Accuracy on the test pictures, with all tasks attached."""
        self.answers: dict[str, Tensor] = {}
        for tasks in (["digits"], ["shape", "count"]):
            test = self.data[tasks[0]]["test"]
            parts = torch.split(_pixels(self.model, test, range(len(test))), 64)
            with torch.inference_mode():
                found = [
                    self.model(part, tasks=tasks)
                    for part in self._watched(f"testing {' and '.join(tasks)}", parts)
                ]
            self.answers |= {name: torch.cat([one[name] for one in found]) for name in tasks}
        accuracies = {
            name: _accuracy(answers, self.data[name]["test"])
            for name, answers in self.answers.items()
        }
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for title in ("task", "classes", "test accuracy", "of pictures", "by chance"):
            table.add_column(title, justify="left" if title == "task" else "right")
        for name, accuracy in accuracies.items():
            test = self.data[name]["test"]
            chance = 1 / len(test.classes)
            table.add_row(name, str(len(test.classes)), f"{accuracy:.1%}", f"{len(test):,}",
                          f"{chance:.0%}")  # fmt: skip
        self.console.print(table)
        return accuracies

    def _ask(self) -> dict[str, Any]:
        """All questions about one picture, in one pass."""
        test, counts = self.data["shape"]["test"], self.data["count"]["test"]
        chosen = next(
            (
                i
                for i in range(len(test))
                if int(self.answers["shape"][i].argmax()) == int(test.labels[i])
                and int(self.answers["count"][i].argmax()) == int(counts.labels[i]) == 2
            ),
            0,
        )
        pixels = np.asarray(test.read(chosen))
        Image.fromarray(pixels).save(self.folder / "scene.png")
        with torch.inference_mode():
            logits = self.model(_pixels(self.model, test, [chosen]))
        answers = {}
        for name, values in logits.items():
            names = (
                self.model.trunk.labels if name == "base" else self.model.task(name).spec.classes
            )
            share, best = values[0].softmax(-1).max(-1)
            answers[name] = {
                "class": (names or ())[int(best)] if names else str(int(best)),
                "probability": round(float(share), 4),
            }
        truth = {
            "shape": test.classes[test.labels[chosen]],
            "count": counts.classes[counts.labels[chosen]],
        }
        self._title("One picture, one pass, every question")
        if self.console.is_terminal:
            self.console.print(_drawn(pixels))
        self._say(f"It shows: {truth['shape']}, {truth['count']}. Asked at once:")
        for name, answer in answers.items():
            note = {
                "base": "the ViT itself, which knows no shapes",
                "digits": "asked too, though nobody wrote a digit",
            }.get(name, "right" if answer["class"] == truth.get(name) else "wrong")
            self._say(f"  {name:7} {answer['class']:11} {answer['probability']:5.0%}   {note}")
        self._say(f"The picture is {self.out}/scene.png.")
        return {"file": "scene.png", "truth": truth, "answers": answers}

    def _prove(self) -> bool:
        """Compare with the trunk as it is on disk, which knows of no task."""
        plain = load_trunk("pico").eval()
        test = self.data["shape"]["test"]
        pictures = min(200, len(test))
        parts = torch.split(_pixels(self.model, test, range(pictures)), 50)
        with torch.inference_mode():
            pairs = [
                (self.model(part, exact=True)["base"], plain(part))
                for part in self._watched("comparing base with the plain ViT", parts)
            ]
        ours, theirs = (torch.cat(logits) for logits in zip(*pairs, strict=True))
        identical = torch.equal(ours, theirs) and plain.fingerprint == self.model.trunk.fingerprint
        self._title("The ViT did not change by a bit")
        self._say(
            f"{ours.numel():,} numbers of base on {pictures} pictures, three tasks attached, "
            "beside those of the plain ViT: "
            + ("identical, bit for bit." if identical else "DIFFERENT. Please report this.")
        )
        return identical

    def _time(self) -> dict[str, float]:
        """One pass for all against a pass for each, in turns, so that both see the same machine."""
        test = self.data["shape"]["test"]
        images = min(16, len(test))
        pixels = _pixels(self.model, test, range(images))
        names = ["base", *self.model.tasks]
        spent: dict[str, list[float]] = {"one_pass": [], "pass_per_task": [], "plain_trunk": []}
        with torch.inference_mode():
            turns = range(self.size.rounds + 1)  # the first warms up
            for turn in self._watched("timing", turns):
                for what, times in spent.items():
                    began = time.perf_counter()
                    if what == "one_pass":
                        self.model(pixels)
                    elif what == "plain_trunk":
                        self.model.trunk(pixels)
                    else:
                        for name in names:
                            self.model(pixels, tasks=[name])
                    if turn:
                        times.append(time.perf_counter() - began)
        each = {what: 1000 * statistics.median(t) / images for what, t in spent.items()}
        ratio = each["pass_per_task"] / each["one_pass"]
        self._title("One pass for all")
        self._say(
            f"{len(names)} answers in one pass: {each['one_pass']:.1f} ms a picture. "
            f"A pass for each: {each['pass_per_task']:.1f} ms, {ratio:.1f} times as long. "
            f"The plain ViT alone: {each['plain_trunk']:.1f} ms."
        )
        return {**{f"{k}_ms": round(v, 3) for k, v in each.items()}, "ratio": round(ratio, 2)}

    def _unmask(self) -> dict[str, Any]:
        """What happens when tasks read each other's cells, and when the trunk does."""
        first, others = "digits", [name for name in self.model.tasks if name != "digits"]
        test = self.data[first]["test"]
        beside = [others[:count] for count in range(len(others) + 1)]
        parts = torch.split(_pixels(self.model, test, range(len(test))), 64)
        found = [
            _unmasked(self.model, first, beside, part)
            for part in self._watched("taking the mask away", parts)
        ]
        logits = {key: torch.cat([part[key] for part in found]) for key in found[0]}
        steps = [
            {
                "beside": added,
                "with_mask": _accuracy(logits[f"masked {len(added)}"], test),
                "without_mask": _accuracy(logits[f"free {len(added)}"], test),
            }
            for added in beside
        ]
        plain, moved = logits["base"].argmax(1), logits["base free"].argmax(1)
        changed = round(float((moved != plain).float().mean()), 4)
        self._title("Without the mask")
        self._say("Test accuracy of digits when other engrams are added to the same ViT:")
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 2))
        table.add_column("")
        table.add_column("masked", justify="right")
        table.add_column("reading their cells", justify="right")
        for added, step in zip(beside, steps, strict=True):
            what = f"+ {added[-1]}" if added else "alone"
            table.add_row(what, f"{step['with_mask']:.1%}", f"{step['without_mask']:.1%}")
        self.console.print(table)
        self._say(
            f"If the ViT's own tokens read them as well, "
            f"base changes {changed:.0%} of its answers about these pictures."
        )
        return {"task": first, "steps": steps, "base_answers_changed": changed}

    def _report(self) -> None:
        """The page: what the promises came to, then each task."""
        passes, unmasked = self.results["passes"], self.results["without_mask"]
        asked = self.results["picture"]
        scene = np.asarray(Image.open(self.folder / asked["file"]))
        rows = [
            (name, answer["class"], asked["truth"].get(name, "–"), f"{answer['probability']:.0%}")
            for name, answer in asked["answers"].items()
        ]
        answers = (
            f'<div class="ask">{picture(scene, "the scene that was asked about")}'
            + table(("task", "answer", "truth", "probability"), rows, words=3)
            + "</div>"
        )
        longest = max(passes["pass_per_task_ms"], passes["one_pass_ms"])
        timing = paragraph(
            "Time for one picture, every question answered: median of passes that took turns on "
            "this machine."
        ) + bars(
            [
                (label, passes[key] / longest, f"{passes[key]:.1f} ms")
                for key, label in (
                    ("one_pass_ms", "one pass for all"),
                    ("pass_per_task_ms", "a pass for each"),
                    ("plain_trunk_ms", "the plain ViT"),
                )
            ],
            kinds=("", "wrong", "plain"),
        )
        mask_rows: list[tuple[str, float, str]] = []
        for step in unmasked["steps"]:
            beside = " and ".join(step["beside"])
            for key, what in (("with_mask", "masked"), ("without_mask", "no mask")):
                label = f"with {beside}, {what}" if beside else f"alone, {what}"
                mask_rows.append((label, step[key], f"{step[key]:.1%}"))
        mask = paragraph(
            f"Test accuracy of {unmasked['task']} as other engrams are added to the same ViT. "
            "Masked, it cannot see them. Without the mask it reads their class tokens and cells, "
            "for which it was not trained. If the ViT's own tokens read all cells too, base "
            f"changes {unmasked['base_answers_changed']:.0%} of its answers about these pictures."
        ) + bars(mask_rows, kinds=("", "wrong") * len(unmasked["steps"]))
        proof = paragraph(
            "With all tasks attached, the ViT's own answers are identical to those of the plain "
            "ViT, bit for bit."
            if self.results["base_identical"]
            else "The ViT's own answers differ from those of the plain ViT. Please report this."
        )
        parts = [
            TaskPart(
                Answers(
                    name,
                    self.data[name]["test"],
                    self.answers[name],
                    torch.from_numpy(self.data[name]["test"].labels),
                    torch.arange(len(self.answers[name])),
                    (),
                ),
                self.learned[name].history,
            )
            for name in self.data
        ]
        with self.bars() as progress:
            progress("drawing the report", 0, 1)
            write_report(
                self.folder / "report.html",
                self.model,
                parts,
                title="One frozen ViT, three engrams",
                lead="pico, a small ViT that knows CIFAR-10, learned three more tasks: handwritten "
                "digits, which shape a scene shows, and how many of them, which extends the "
                "second. Each is a file of about 30 KB.",
                first=[
                    Section("ask", "One picture, one pass, every question", answers),
                    Section("proof", "The ViT did not change", proof),
                    Section("timing", "One pass for all", timing),
                    Section("mask", "Without the mask", mask),
                ],
            )
            progress("drawing the report", 1, 1)

    def _end(self) -> None:
        self._title(f"Done in {self.results['seconds']:.0f} seconds")
        self._say(f"The whole story with pictures: {self.out}/report.html")
        self._say(
            "Your turn: put pictures into one folder for each class, photos/cats, photos/dogs, …, "
            "and run"
        )
        self._say("  engram fit photos --task pets -o pets.safetensors")

    # Telling

    def _watched(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """The items, one after the other, with a progress bar."""
        with self.bars() as progress:
            for done, item in enumerate(items):
                progress(what, done, len(items))
                yield item
            progress(what, len(items), len(items))

    def _title(self, text: str) -> None:
        self.console.print(f"\n{text}", style="bold", markup=False, highlight=False)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


def _drawn(pixels: Pixels) -> Text:
    """A small picture as text: two pixels a letter, one above the other."""
    text = Text()
    for top, bottom in zip(pixels[::2], pixels[1::2], strict=False):
        text.append("  ")
        for above, below in zip(top.tolist(), bottom.tolist(), strict=True):
            colours = [f"rgb({','.join(map(str, colour))})" for colour in (above, below)]
            text.append("▀", style=f"{colours[0]} on {colours[1]}")
        text.append("\n")
    return text


# Numbers


def _digits(size: Size, seed: int) -> Splits:
    splits = load("digits")
    train, val = split_validation(splits["train"], 0.1, seed)
    test = splits["test"]
    return replace(
        splits,
        train=train.subset(np.arange(min(size.digits, len(train)))),
        val=val.subset(np.arange(min(size.test, len(val)))),
        test=test.subset(np.arange(min(size.test, len(test)))),
    )


def _pixels(model: MemoryViT, dataset: Dataset, samples: Sequence[int]) -> Tensor:
    preprocessing = model.preprocessing
    views = [evaluation_view(dataset.read(i), preprocessing) for i in samples]
    return normalise(torch.from_numpy(np.stack(views)), preprocessing)


def _accuracy(logits: Tensor, dataset: Dataset) -> float:
    right = (logits.argmax(1).cpu().numpy() == dataset.labels).mean()
    return round(float(right), 4)


@torch.inference_mode()
def _unmasked(
    model: MemoryViT, first: str, beside: Sequence[Sequence[str]], pixels: Tensor
) -> dict[str, Tensor]:
    """Logits of a task with and without the mask between it and other tasks, and of base.

    Without it, the task reads the class tokens and cells of all of them (`free`), and the trunk's
    own tokens read all cells (`base free`). The trunk runs once for all that leave it alone.
    """
    trunk, task = model.trunk, model.task(first)
    x = trunk.embed(pixels)
    alone = TrunkPass(trunk, x, keep=x.shape[1])
    views = list(alone)
    assert trunk.head is not None
    logits = {"base": trunk.head(alone.tokens, trunk.norm(alone.tokens))}
    for others in beside:
        for what, extends in (("masked", ()), ("free", tuple(range(len(others))))):
            streams = [*(_stream(model, name) for name in others), _stream(model, first, extends)]
            tokens = forward_tasks(trunk, views, Memory(trunk, streams), len(x))
            logits[f"{what} {len(others)}"] = task.head(trunk.norm(tokens[:, -1]))
    cells = [one.cells.detach() for one in model.tasks.values() if one.cells is not None]
    moved = full_attention(trunk, x, torch.cat(cells, dim=1))
    logits["base free"] = trunk.head(moved, trunk.norm(moved))
    return logits


def _stream(model: MemoryViT, name: str, extends: tuple[int, ...] = ()) -> Stream:
    task = model.task(name)
    assert task.class_token is not None
    assert task.cells is not None
    return Stream(name, task.class_token, task.cells, extends)
