"""The demo: three tasks on one frozen ViT, answered in one pass, with proof of the promises.

Everything is real and made on the spot: UCI's handwritten digits, two questions about
generated scenes, and the bundled backbone. Nothing is downloaded. `Demo.run` is the story.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table as Columns
from rich.text import Text as Line
from torch import Tensor

from engram.backbones.load import load_backbone
from engram.backbones.recommended import RECOMMENDED
from engram.data.datasets import Dataset, Splits, load
from engram.data.folds import split_validation
from engram.data.scenes import scene_splits
from engram.experiments.demo_output import DEMO, demo_folder, write_results
from engram.experiments.timing import Case, compare
from engram.images.decode import Pixels
from engram.inference.engine import load_model
from engram.inference.evaluate import Answers, answers
from engram.inference.predict import predict
from engram.methods import Base
from engram.methods.forward import full_attention
from engram.model import MemoryViT
from engram.report.contents import Bar, Bars, Picture, Pictures, Section, Table, Text
from engram.report.costs_section import costs_by_task
from engram.report.images import backbone_views, thumbnail
from engram.report.page import write_sections
from engram.report.task_section import TaskPart, task_sections
from engram.store.compose import compose
from engram.train.fit import fit
from engram.train.recipe import Recipe
from engram.train.runs.result import Result
from engram.util.invocation import program
from engram.util.progress import Progress, labelled, silent
from engram.vit import ViT

_LEAD = (
    "pico, a small ViT that knows CIFAR-10, learned three more tasks: handwritten digits, which "
    "shape a scene shows, and how many shapes, which extends the second. Each is a file of about "
    "30 KB."
)
_NOTES = {
    Base.name: "the ViT itself, which knows no shapes",
    "digits": "it answers too, though there is no digit",
}


@dataclass(frozen=True)
class DemoSize:
    """Amounts of data and training: as much as two cores can in about a minute."""

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
    answers: dict[str, Answers] = field(default_factory=dict)  # for the test images
    sections: list[Section] = field(default_factory=list)  # of the page, which were printed, too

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
                for name, costs in costs_by_task(model).items()
            },
        }
        with self.bars() as progress:
            progress("writing the report", 0, 0)
            parts = [TaskPart(self.answers[name], self.trained[name].history) for name in self.data]
            sections, page = task_sections(model, parts), self.folder / "report.html"
            title = "One frozen ViT, three engrams"
            write_sections(page, title, _LEAD, [*self.sections, *sections], model.backbone)
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
        splits, most = load("digits"), self.size.test
        train, val = split_validation(splits["train"], 0.1, self.seed)

        def first(dataset: Dataset, most: int) -> Dataset:
            return dataset.subset(np.arange(min(most, len(dataset))))

        test = first(splits["test"], most)
        return replace(
            splits, train=first(train, self.size.digits), val=first(val, most), test=test
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
            result = fit(model, name, splits, recipe, progress=labelled(progress, name))
        self.data[name], self.trained[name] = splits, result
        path = self.folder / f"{name}.safetensors"
        model.save(name, path, metrics=dict(result.metrics), recipe=recipe.to_dict())
        parameters = sum(p.numel() for p in task.parameters())
        self._print(
            f"{name}: {about}. {len(splits['train']):,} images, {result.seconds:.0f} seconds, "
            f"{parameters:,} parameters, {path.stat().st_size / 1000:.0f} KB."
        )

    def _compose(self) -> MemoryViT:
        """Make a bundle of the files, and go on with what is on disk."""
        paths = [self.folder / f"{name}.safetensors" for name in self.data]
        compose(paths, self.folder / "bundle")
        for path in paths:
            path.unlink()
        self._title("Composed")
        self._print(f"{self.out}/bundle holds all three; nothing had to be trained again.")
        return load_model(self.folder / "bundle").eval()

    # Answers

    def _evaluate(self, model: MemoryViT) -> dict[str, float]:
        """Accuracy on the test images, with all tasks attached."""
        accuracies, rows = {}, []
        for name, splits in self.data.items():
            test = splits["test"]
            with self.bars() as progress:
                shown = partial(progress, f"testing {name}")
                self.answers[name] = answers(model, test, name, workers=0, progress=shown)
            accuracies[name] = round(float(self.answers[name].metrics()["accuracy"]), 4)
            classes, chance = str(len(test.classes)), f"{1 / len(test.classes):.0%}"
            rows.append((name, classes, f"{accuracies[name]:.1%}", f"{len(test):,}", chance))
        self._print_table(("task", "classes", "test accuracy", "images", "by chance"), rows)
        return accuracies

    def _ask(self, model: MemoryViT) -> dict[str, Any]:
        """Ask all tasks about one image, in one pass.

        It is the first scene of three shapes for which both answers are right; else the first.
        """
        test, counts = self.data["shape"]["test"], self.data["count"]["test"]
        right = [
            self.answers[name].logits.argmax(1).cpu().numpy() == self.data[name]["test"].labels
            for name in ("shape", "count")
        ]
        chosen = int(np.argmax(right[0] & right[1] & (counts.labels == 2)))
        pixels = np.asarray(test.read(chosen))
        Image.fromarray(pixels).save(self.folder / "scene.png")
        names = [Base.name, *model.tasks]
        answered = predict(model, pixels, tasks=names, top_k=1, device="cpu")["tasks"]
        found = {name: best for name, (best,) in answered.items()}
        truth = {
            "shape": test.classes[test.labels[chosen]],
            "count": counts.classes[counts.labels[chosen]],
        }
        result = {"file": "scene.png", "truth": truth, "answers": found}
        self._tell(answers_section(result, pixels), pixels)
        self._print(f"The image is {self.out}/scene.png.")
        return result

    # Proof

    def _compare(self, model: MemoryViT) -> bool:
        test = self.data["shape"]["test"]
        images = min(200, len(test))
        batches = self._batches("comparing base with the plain ViT", model, test, images, 50)
        identical = base_is_identical(model, load_backbone("pico").eval(), batches)
        self._tell(proof_section(identical, images))
        return identical

    @torch.inference_mode()
    def _time(self, model: MemoryViT) -> dict[str, float]:
        """Milliseconds per image: one pass for all tasks, a pass for each, the plain backbone."""
        test, names = self.data["shape"]["test"], [Base.name, *model.tasks]
        pixels = backbone_views(model, test, range(min(16, len(test))))[1]
        cases = {
            "one_pass": Case(lambda: model(pixels)),
            "pass_per_task": Case(lambda: [model(pixels, tasks=[name]) for name in names]),
            "plain_backbone": Case(lambda: model.backbone(pixels)),
        }
        with self.bars() as progress:
            shown = partial(progress, "timing", 0, 0)
            times = compare(cases, seconds=0, least=self.size.rounds, say=shown)
        ms = {name: 1000 * timing.seconds / len(pixels) for name, timing in times.items()}
        passes = {f"{name}_ms": round(value, 3) for name, value in ms.items()}
        passes["ratio"] = round(ms["pass_per_task"] / ms["one_pass"], 2)
        self._tell(timing_section(passes))
        return passes

    def _remove_mask(self, model: MemoryViT) -> dict[str, Any]:
        test = self.data["digits"]["test"]
        batches = self._batches("removing the mask", model, test, len(test), 64)
        found = remove_mask(model, "digits", test, batches)
        self._tell(mask_section(found))
        return found

    # The end

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
        self, what: str, model: MemoryViT, dataset: Dataset, images: int, size: int
    ) -> Iterator[Tensor]:
        """The first images of a dataset in batches, with a progress bar."""
        pixels = backbone_views(model, dataset, range(images))[1]
        with self.bars() as progress:
            for done, batch in enumerate(torch.split(pixels, size)):
                progress(what, done * size, images)
                yield batch
            progress(what, images, images)

    def _tell(self, section: Section, picture: Pixels | None = None) -> None:
        """Print a section of the page, with a picture where a terminal can show it."""
        self.sections.append(section)
        self._title(section.title)
        if picture is not None and self.console.is_terminal:
            self.console.print(_as_text(picture))
        for content in section.contents:
            if isinstance(content, Text):
                self._print(content.text)
            elif isinstance(content, Table):
                self._print_table(content.columns, content.rows)
            elif isinstance(content, Bars):
                self._print_table(("", ""), [(bar.label, bar.text) for bar in content.bars])

    def _title(self, text: str) -> None:
        self.console.print(f"\n{text}", style="bold", markup=False, highlight=False)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def _print_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Columns(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=any(columns))
        for i, name in enumerate(columns):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


# Proofs


@torch.inference_mode()
def base_is_identical(model: MemoryViT, plain: ViT, batches: Iterable[Tensor]) -> bool:
    """Whether base equals, bit for bit, the logits of the plain backbone, which has no tasks."""
    same = [torch.equal(model(batch, exact=True)[Base.name], plain(batch)) for batch in batches]
    return all(same) and plain.fingerprint == model.backbone.fingerprint


@torch.inference_mode()
def remove_mask(
    model: MemoryViT, task: str, test: Dataset, batches: Iterable[Tensor]
) -> dict[str, Any]:
    """The accuracy of a task as others are added, with the mask of Table 1 and without it.

    And how many answers of the backbone change if its own tokens read all cells.
    """
    backbone, others = model.backbone, [name for name in model.tasks if name != task]
    # Beside the task stand copies of it that read the others, as if it extended them.
    steps = {f"{task}-{count}": others[:count] for count in range(len(others) + 1)}
    beside = MemoryViT(backbone).eval()
    for name in (*others, task):
        _attach(beside, model, name, name)
    for copy, added in steps.items():
        _attach(beside, model, task, copy, added)
    cells = torch.cat([one.input().tensors["cells"] for one in model.tasks.values()], dim=1)
    assert backbone.head is not None
    right, changed = defaultdict[str, list[Tensor]](list), list[Tensor]()
    labels = iter(torch.from_numpy(test.labels))
    for batch in batches:
        true = torch.stack([next(labels) for _ in batch])
        for copy, added in steps.items():
            found = beside(batch, tasks=[Base.name, *added, task, copy])
            for key, name in ((copy, copy), (f"{copy}, masked", task)):
                right[key].append(found[name].argmax(1).cpu() == true)
        tokens = full_attention(backbone, batch, {"cells": cells})
        logits = backbone.head(tokens, backbone.norm(tokens))
        changed.append(logits.argmax(1) != found[Base.name].argmax(1))

    def share(parts: list[Tensor]) -> float:
        return round(float(torch.cat(parts).float().mean()), 4)

    def step(copy: str) -> dict[str, Any]:
        masked, unmasked = share(right[f"{copy}, masked"]), share(right[copy])
        return {"beside": steps[copy], "with_mask": masked, "without_mask": unmasked}

    return {"task": task, "steps": list(map(step, steps)), "base_answers_changed": share(changed)}


def _attach(
    to: MemoryViT, model: MemoryViT, task: str, name: str, reads: Sequence[str] = ()
) -> None:
    """Attach a task of a model under another name, as if it extended these and no others."""
    engram, parents = model.engram(task), {other: to.engram(other).content for other in reads}
    spec = replace(engram.spec, name=name, extends=tuple(reads))
    to.attach(replace(engram, spec=spec, parents=parents))


def _as_text(pixels: Pixels) -> Line:
    """A small image as text: each character shows two pixels, one above the other."""
    text = Line()
    for top, bottom in zip(pixels[::2], pixels[1::2], strict=False):
        text.append("  ")
        for above, below in zip(top.tolist(), bottom.tolist(), strict=True):
            colours = [f"rgb({','.join(map(str, colour))})" for colour in (above, below)]
            text.append("▀", style=f"{colours[0]} on {colours[1]}")
        text.append("\n")
    return text


# Sections of the page, which the terminal shows as well


def answers_section(asked: Mapping[str, Any], scene: Pixels) -> Section:
    """The answers of all tasks about one image, from the results of the demo."""
    truth, rows = asked["truth"], []
    for name, answer in asked["answers"].items():
        right = "right" if answer["class"] == truth.get(name) else "wrong"
        cells = (name, answer["class"], truth.get(name, "–"), f"{answer['probability']:.0%}")
        rows.append((*cells, _NOTES.get(name, right)))
    contents = [
        Text(f"The image shows: {', '.join(truth.values())}. All tasks answer at once:"),
        Pictures([Picture(thumbnail(scene, "the scene"), "scene.png", "The image")]),
        Table(("task", "answer", "truth", "probability", ""), rows, text_columns=3),
    ]
    return Section("ask", "One image, one pass, every answer", contents)


def proof_section(identical: bool, images: int) -> Section:
    text = (
        f"The logits of base for {images} images, with three tasks attached, are "
        + ("identical to" if identical else "DIFFERENT from")
        + " those of the plain ViT"
        + (", bit for bit." if identical else ". Please report this.")
    )
    return Section("proof", "The ViT did not change by a bit", [Text(text)])


def timing_section(passes: Mapping[str, float]) -> Section:
    longest = max(passes["pass_per_task_ms"], passes["one_pass_ms"])
    bars = [
        Bar(label, passes[key] / longest, f"{passes[key]:.1f} ms", style)
        for key, label, style in (
            ("one_pass_ms", "one pass for all", ""),
            ("pass_per_task_ms", "a pass for each", "wrong"),
            ("plain_backbone_ms", "the plain ViT", "plain"),
        )
    ]
    text = (
        "Time per image with every task answered, the median of passes that took turns on this "
        f"machine: a pass for each takes {passes['ratio']:.1f} times as long as one for all."
    )
    return Section("timing", "One pass for all", [Text(text), Bars(bars)])


def mask_section(unmasked: Mapping[str, Any]) -> Section:
    bars = []
    for step in unmasked["steps"]:
        others = " and ".join(step["beside"])
        where = f"with {others}" if others else "alone"
        for key, what, style in (("with_mask", "mask", ""), ("without_mask", "no mask", "wrong")):
            bars.append(Bar(f"{where}, {what}", step[key], f"{step[key]:.1%}", style))
    text = (
        f"Test accuracy of {unmasked['task']} as other engrams are added to the same ViT. With "
        "the mask, it cannot read them. Without the mask, it reads their class tokens and cells, "
        "for which it was not trained. If the ViT's own tokens read all cells too, base changes "
        f"{unmasked['base_answers_changed']:.0%} of its answers for these images."
    )
    return Section("mask", "Without the mask", [Text(text), Bars(bars)])
