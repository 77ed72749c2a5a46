"""The demo: three tasks on one frozen ViT, answered in one pass, with proof of the promises.

Everything is real and made on the spot: UCI's handwritten digits, two questions about
generated scenes, and the bundled backbone. Nothing is downloaded. `Demo.run` is the story.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from engram.backbones.load import load_backbone
from engram.backbones.recommended import RECOMMENDED
from engram.data.datasets import Dataset, Splits, load
from engram.data.scenes import scene_splits
from engram.data.validation import split_validation
from engram.experiments.demo_checks import (
    accuracy,
    base_is_identical,
    predict_batches,
    read_images,
    remove_mask,
    time_passes,
)
from engram.experiments.demo_output import DEMO, demo_folder, write_results
from engram.experiments.demo_page import write_demo_page
from engram.images.decode import Pixels
from engram.inference.evaluate import Answers
from engram.inference.load import load_model
from engram.model import MemoryViT
from engram.report.costs import costs_of
from engram.report.task_section import TaskPart
from engram.store.bundles import compose
from engram.train.fit import fit
from engram.train.recipe import Recipe
from engram.train.result import Result
from engram.util.invocation import program
from engram.util.progress import Progress, silent

T = TypeVar("T")


@dataclass(frozen=True)
class DemoSize:
    """How much is trained: as much as two cores can in about a minute."""

    digits: int = 1400  # training images
    digits_epochs: int = 12
    scenes: int = 1600
    scenes_epochs: int = 10
    test: int = 400
    rounds: int = 15  # of the timing


def run_demo(
    out: str | os.PathLike[str] = "demo",
    *,
    seed: int = 0,
    size: DemoSize | None = None,
    console: Console | None = None,
    bars: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(silent),
) -> dict[str, Any]:
    """Run the demo, write `out`/report.html and `out`/results.json, and return the results.

    An earlier demo at `out` is replaced when the new one is complete; any other folder is refused.
    """
    console = console or Console(quiet=True)
    with demo_folder(out) as folder:
        results = Demo(folder, Path(out), seed, size or DemoSize(), console, bars).run()
        write_results(folder, results)
    return results


@dataclass
class Demo:
    """Trains, composes, evaluates, asks, compares and times, and prints what it finds."""

    folder: Path  # where files are written now
    out: Path  # where the user will find them
    seed: int
    size: DemoSize
    console: Console
    bars: Callable[[], AbstractContextManager[Progress]]
    data: dict[str, Splits] = field(default_factory=dict)  # by task, as the following
    trained: dict[str, Result] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)  # for the test images

    def run(self) -> dict[str, Any]:
        start = time.perf_counter()
        self._train()
        model = self._compose()
        results: dict[str, Any] = {
            "what": DEMO,
            "seed": self.seed,
            "accuracies": self._evaluate(model),
            "picture": self._ask(model),
            "base_identical": self._compare(model),
            "passes": self._time(model),
            "without_mask": self._remove_mask(model),
            "costs": {
                name: {**asdict(costs), "share": round(costs.share, 5)}
                for name, costs in costs_of(model).items()
            },
        }
        self._write_page(model, results)
        results["seconds"] = round(time.perf_counter() - start, 1)
        self._end(results["seconds"])
        return results

    # Training

    def _train(self) -> None:
        model = MemoryViT(load_backbone("pico"))
        backbone, config = model.backbone, model.backbone.config
        self._title("One frozen ViT")
        self._print(
            f"pico is a small ViT ({config.depth} layers, width {config.width}, "
            f"{sum(p.numel() for p in backbone.parameters()):,} parameters) that knows the ten "
            f"classes of CIFAR-10: {', '.join(backbone.labels or ())}. It stays as it is."
        )
        self._title("Three tasks, each an engram: 5 memory cells per layer, a class token, a head")
        self._train_task(model, "digits", "handwritten digits", self._digits())
        self._train_task(model, "shape", "which shape a scene shows", self._scenes("shape"))
        about = "how many shapes; it extends shape"
        self._train_task(model, "count", about, self._scenes("count"), ("shape",))

    def _digits(self) -> Splits:
        splits = load("digits")
        train, val = split_validation(splits["train"], 0.1, self.seed)
        return replace(
            splits,
            train=_first(train, self.size.digits),
            val=_first(val, self.size.test),
            test=_first(splits["test"], self.size.test),
        )

    def _scenes(self, question: str) -> Splits:
        train, val = self.size.scenes, max(20, self.size.test // 2)
        return scene_splits(question, train=train, val=val, test=self.size.test, seed=self.seed)

    def _train_task(
        self, model: MemoryViT, name: str, about: str, splits: Splits, extends: Sequence[str] = ()
    ) -> None:
        """Train a task, save it, and say what came of it."""
        recipe = Recipe(  # a higher rate than usual, because there are few steps
            epochs=self.size.digits_epochs if name == "digits" else self.size.scenes_epochs,
            lr=3e-3,
            seed=self.seed,
            data_seed=self.seed,
            evaluations=8,
            workers=0,
        )
        task = model.add_task(name, splits.classes, 5, extends=extends, seed=self.seed)
        with self.bars() as progress:

            def named(what: str, done: int, total: int, note: str = "") -> None:
                progress(f"{name}: {what}", done, total, note)

            result = fit(model, name, splits, recipe, progress=named)
        self.data[name], self.trained[name] = splits, result
        path = self._engram(name)
        model.save(name, path, metrics=dict(result.metrics), recipe=recipe.to_dict())
        parameters = sum(p.numel() for p in task.parameters())
        self._print(
            f"{name}: {about}. {len(splits['train']):,} images, {result.seconds:.0f} seconds, "
            f"{parameters:,} parameters, {path.stat().st_size / 1000:.0f} KB."
        )

    def _engram(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _compose(self) -> MemoryViT:
        """Make a bundle of the files, and go on with what is on disk."""
        paths = [self._engram(name) for name in self.data]
        compose(paths, self.folder / "bundle")
        for path in paths:
            path.unlink()
        self._title("Composed")
        self._print(f"{self.out}/bundle holds all three; nothing had to be trained again.")
        return load_model(self.folder / "bundle").eval()

    # Answers

    def _evaluate(self, model: MemoryViT) -> dict[str, float]:
        """Accuracy on the test images, with all tasks attached."""
        for tasks in (["digits"], ["shape", "count"]):
            test = self.data[tasks[0]]["test"]
            batches = self._batches(f"testing {' and '.join(tasks)}", model, test)
            self.logits |= predict_batches(model, tasks, batches)
        tests = {name: self.data[name]["test"] for name in self.logits}
        accuracies = {name: accuracy(self.logits[name], test) for name, test in tests.items()}
        self._print_table(
            ("task", "classes", "test accuracy", "images", "by chance"),
            [
                (
                    name,
                    str(len(test.classes)),
                    f"{accuracies[name]:.1%}",
                    f"{len(test):,}",
                    f"{1 / len(test.classes):.0%}",
                )
                for name, test in tests.items()
            ],
        )
        return accuracies

    def _ask(self, model: MemoryViT) -> dict[str, Any]:
        """All tasks about one image, in one pass."""
        test, counts = self.data["shape"]["test"], self.data["count"]["test"]
        chosen = self._example(test, counts)
        pixels = np.asarray(test.read(chosen))
        Image.fromarray(pixels).save(self.folder / "scene.png")
        with torch.inference_mode():
            logits = model(read_images(model, test, [chosen]))
        answers = {name: _best(model, name, values[0]) for name, values in logits.items()}
        truth = {
            "shape": test.classes[test.labels[chosen]],
            "count": counts.classes[counts.labels[chosen]],
        }
        self._title("One image, one pass, every answer")
        if self.console.is_terminal:
            self.console.print(_as_text(pixels))
        self._print(f"It shows: {truth['shape']}, {truth['count']}. All tasks answer at once:")
        for name, answer in answers.items():
            note = {
                "base": "the ViT itself, which knows no shapes",
                "digits": "it answers too, though there is no digit",
            }.get(name, "right" if answer["class"] == truth.get(name) else "wrong")
            self._print(f"  {name:7} {answer['class']:11} {answer['probability']:5.0%}   {note}")
        self._print(f"The image is {self.out}/scene.png.")
        return {"file": "scene.png", "truth": truth, "answers": answers}

    def _example(self, shapes: Dataset, counts: Dataset) -> int:
        """The first scene of three shapes for which both answers are right; else the first."""
        predicted = {name: self.logits[name].argmax(1).cpu().numpy() for name in ("shape", "count")}
        right = (predicted["shape"] == shapes.labels) & (predicted["count"] == counts.labels)
        return int(np.argmax(right & (counts.labels == 2)))

    # Proof

    def _compare(self, model: MemoryViT) -> bool:
        test = self.data["shape"]["test"]
        images = min(200, len(test))
        batches = self._batches("comparing base with the plain ViT", model, test, images, 50)
        identical = base_is_identical(model, load_backbone("pico").eval(), batches)
        self._title("The ViT did not change by a bit")
        self._print(
            f"{images * len(model.backbone.labels or ()):,} logits of base for {images} images, "
            "with three tasks attached, compared with those of the plain ViT: "
            + ("identical, bit for bit." if identical else "DIFFERENT. Please report this.")
        )
        return identical

    def _time(self, model: MemoryViT) -> dict[str, float]:
        test = self.data["shape"]["test"]
        pixels = read_images(model, test, range(min(16, len(test))))
        turns = self._tracked("timing", range(self.size.rounds + 1))
        passes = time_passes(model, pixels, turns)
        self._title("One pass for all")
        self._print(
            f"{1 + len(model.tasks)} answers in one pass: {passes['one_pass_ms']:.1f} ms per "
            f"image. A pass for each: {passes['pass_per_task_ms']:.1f} ms, "
            f"{passes['ratio']:.1f} times as long. The plain ViT alone: "
            f"{passes['plain_backbone_ms']:.1f} ms."
        )
        return passes

    def _remove_mask(self, model: MemoryViT) -> dict[str, Any]:
        test = self.data["digits"]["test"]
        batches = self._batches("removing the mask", model, test)
        found = remove_mask(model, "digits", test, batches)
        self._title("Without the mask")
        self._print("Test accuracy of digits when other engrams are added to the same ViT:")
        rows = [
            (
                f"+ {step['beside'][-1]}" if step["beside"] else "alone",
                f"{step['with_mask']:.1%}",
                f"{step['without_mask']:.1%}",
            )
            for step in found["steps"]
        ]
        self._print_table(("", "masked", "reading their cells"), rows)
        self._print(
            "If the ViT's own tokens read them as well, base changes "
            f"{found['base_answers_changed']:.0%} of its answers for these images."
        )
        return found

    # The end

    def _write_page(self, model: MemoryViT, results: dict[str, Any]) -> None:
        parts = []
        for name, splits in self.data.items():
            test, logits = splits["test"], self.logits[name]
            labels, samples = torch.from_numpy(test.labels), torch.arange(len(logits))
            answers = Answers(name, test, logits, labels, samples, failed=())
            parts.append(TaskPart(answers, self.trained[name].history))
        scene = np.asarray(Image.open(self.folder / results["picture"]["file"]))
        with self.bars() as progress:
            progress("writing the report", 0, 1)
            write_demo_page(self.folder / "report.html", model, parts, results, scene)
            progress("writing the report", 1, 1)

    def _end(self, seconds: float) -> None:
        self._title(f"Done in {seconds:.0f} seconds")
        self._print(f"The whole story with images: {self.out}/report.html")
        best = RECOMMENDED[0]
        self._print(
            "Your turn: put images into one folder for each class, photos/cats, photos/dogs, …, "
            f"and run the command below. For photographs it uses {best.repo}, a larger ViT, which "
            f"it downloads once (about {best.download / 1e6:.0f} MB)."
        )
        self._print(f"  {program()} fit photos --task pets -o pets.safetensors")

    # The terminal

    def _batches(
        self, what: str, model: MemoryViT, dataset: Dataset, images: int | None = None, of: int = 64
    ) -> Iterator[Tensor]:
        """The first images of a dataset in batches, with a progress bar."""
        pixels = read_images(model, dataset, range(len(dataset) if images is None else images))
        return self._tracked(what, torch.split(pixels, of))

    def _tracked(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """The items, with a progress bar."""
        with self.bars() as progress:
            for done, item in enumerate(items):
                progress(what, done, len(items))
                yield item
            progress(what, len(items), len(items))

    def _title(self, text: str) -> None:
        self.console.print(f"\n{text}", style="bold", markup=False, highlight=False)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def _print_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for i, name in enumerate(columns):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def _first(dataset: Dataset, images: int) -> Dataset:
    return dataset.subset(np.arange(min(images, len(dataset))))


def _best(model: MemoryViT, task: str, logits: Tensor) -> dict[str, Any]:
    """The class with the highest probability, by name."""
    classes = model.task(task).spec.classes
    probability, best = logits.softmax(-1).max(-1)
    name = classes[int(best)] if classes else str(int(best))
    return {"class": name, "probability": round(float(probability), 4)}


def _as_text(pixels: Pixels) -> Text:
    """A small image as text: each character shows two pixels, one above the other."""
    text = Text()
    for top, bottom in zip(pixels[::2], pixels[1::2], strict=False):
        text.append("  ")
        for above, below in zip(top.tolist(), bottom.tolist(), strict=True):
            colours = [f"rgb({','.join(map(str, colour))})" for colour in (above, below)]
            text.append("▀", style=f"{colours[0]} on {colours[1]}")
        text.append("\n")
    return text
