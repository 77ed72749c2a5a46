"""What a task is, without its values: `TaskSpec`, checked when it is made."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from engram.errors import EngramError
from engram.readout import moments_per_layer, squares_count
from engram.side import FORM, QUERIES, side_shapes, squares_seen
from engram.tasks.class_statistics import PREFIX, statistics_shapes
from engram.tasks.kinds import IGNORED, KINDS, Kind
from engram.tasks.regimes import REGIMES, UPDATES, Regime
from engram.tasks.settings import TaskSettings
from engram.tasks.shape import TrunkShape
from engram.util.spelling import spell

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: The largest size of all class names together, as they are written into the header of an engram:
#: 100,000 names of 74 characters.
MAX_CLASS_BYTES = 8_000_000


@dataclass(frozen=True)
class TaskSpec:
    """What a task is, without its values. A setting that makes no sense is an EngramError."""

    name: str
    classes: tuple[str, ...]
    kind: str = "classification"
    regime: str = "masked"
    cells: int = 5  # at every layer
    tokens: int = 1  # class tokens; the paper has one
    extends: tuple[str, ...] = ()
    update: str = "fresh"  # Figure 2b; only where every token reads the cells
    after_norm: bool = False  # cells join behind the norm: converted checkpoints
    adapter_width: int = 32
    rank: int = 16  # the width of side patches
    side_form: int = FORM  # of side patches; files of version 0.1.0 have 1
    layers: int = 0  # whose moments a readout sees, the last ones; 0: all of them
    squares: bool = False  # whether a readout of all layers sees the squares of some, too
    # Of segmentation: the value that each class has in a mask, and the one of ignored pixels.
    values: tuple[int, ...] = ()
    ignore: int = IGNORED

    def __post_init__(self) -> None:
        def refuse(problem: str) -> None:
            raise EngramError(f"Task {self.name!r}: {problem}")

        if not NAME.fullmatch(self.name) or self.name == "base":
            raise EngramError(
                f"{self.name!r} cannot name a task: use 1 to 64 of a-z, 0-9, '.', '_' and '-', "
                "beginning with a letter or a digit, and not 'base', which is the trunk itself."
            )
        if self.regime not in REGIMES:
            refuse(f"there is no regime {self.regime!r}; choose one of {', '.join(REGIMES)}.")
        if self.kind not in KINDS:
            refuse(f"there is no kind of task {self.kind!r}; choose one of {', '.join(KINDS)}.")
        count, (noun, nouns) = len(self.classes), self.does.nouns
        if not self.classes:
            refuse(f"it has no {nouns}; give how many there are, or their names.")
        if count < self.does.least:
            refuse(f"{self.kind} needs at least {self.does.least} {nouns}, not {count}.")
        garbled = next((name for name in self.classes if not _is_text(name)), None)
        if garbled is not None:
            refuse(
                f"the {noun} {garbled!r} is no text in UTF-8, so no answer could name it; rename "
                "its folder, or what else it is named after."
            )
        if len(set(self.classes)) < len(self.classes):
            twice = Counter(self.classes).most_common(1)[0][0]
            refuse(f"the {noun} {twice!r} is there twice; every {noun} needs a name of its own.")
        size = len(json.dumps(json.dumps(self.classes)))  # JSON as text in JSON
        if size > MAX_CLASS_BYTES:
            refuse(
                f"the names of its {count:,} {nouns} take {size / 1e6:.1f} MB, and an engram has "
                f"room for {MAX_CLASS_BYTES / 1e6:g} MB; shorten them."
            )
        for what in ("cells", "tokens", "adapter_width", "rank", "layers"):
            least, value = int(what not in ("cells", "layers")), getattr(self, what)
            if not isinstance(value, int) or not least <= value <= 10_000:
                refuse(
                    f"{spell(what)} is {value!r}; it must be a whole number from {least} to 10,000."
                )
        if self.side_form not in (1, FORM):
            refuse(
                f"its side patches have the form {self.side_form!r}; known are 1 and {FORM}, so it "
                "may need a newer engram-vit."
            )
        if self.update not in UPDATES:
            refuse(f"there is no update {self.update!r}; choose fresh, propagate or add.")
        if self.update != "fresh" and not (self.parts.cells and self.parts.changes_trunk):
            refuse(
                f"{spell('update', self.update)} is for the regimes memory and memory+adapter only."
            )
        if self.extends and not self.parts.extends:
            refuse(
                f"only masked and side tasks extend others, and its regime is {self.regime!r}; "
                f"choose masked, masked+adapter or side, or leave {spell('extends')} out."
            )
        if self.tokens > 1 and not self.parts.masked:
            refuse(f"the regime {self.regime!r} has one class token, not {self.tokens}.")
        if self.does.per_pixel and self.parts.moments:
            refuse(
                f"the regime {self.regime!r} sees averages over the patches, so it cannot answer "
                "for every pixel; choose side or masked."
            )
        if self.does.per_pixel:
            self._check_masks(refuse)
        elif self.values or self.ignore != IGNORED:
            refuse(f"values and ignore say what is in masks, and {self.kind} learns from none.")

    def _check_masks(self, refuse: Callable[[str], None]) -> None:
        count = len(self.classes)
        if count > IGNORED:
            refuse(f"{count} classes are too many for masks, which can have {IGNORED}.")
        if self.tokens != self.does.tokens(count, self.parts.masked):
            refuse(f"segmentation has one class token a class, not {self.tokens} for {count}.")
        values = (*self.values, self.ignore)
        if len(self.values) != count or len(set(values)) < len(values):
            refuse(
                f"{count} classes need as many values in the masks, all different and not the "
                f"ignored {self.ignore}; got {', '.join(map(str, self.values)) or 'none'}."
            )
        if not all(isinstance(value, int) and 0 <= value < 2**16 for value in values):
            refuse(f"values in masks are whole numbers from 0 to 65,535, not {values}.")

    @classmethod
    def create(
        cls,
        name: str,
        classes: int | Sequence[str],
        settings: TaskSettings,
        *,
        kind: str = "classification",
        tokens: int | None = None,
        values: Sequence[int] | None = None,
        ignore: int = IGNORED,
    ) -> TaskSpec:
        """A spec in which everything that was not given is what the kind of task needs."""
        names = class_names(classes)
        does = KINDS.get(kind, KINDS["classification"])  # another one is refused by the spec
        regime = REGIMES.get(settings.regime)
        if tokens is None:
            tokens = does.tokens(len(names), regime is not None and regime.masked)
        if values is None:
            values = range(len(names)) if does.per_pixel else ()
        return cls(
            name=name,
            classes=names,
            kind=kind,
            regime=settings.regime,
            cells=settings.cells,
            tokens=tokens,
            extends=tuple(dict.fromkeys(settings.extends)),
            update=settings.update,
            adapter_width=settings.adapter_width,
            rank=settings.rank,
            values=tuple(values),
            ignore=ignore,
        )

    def recorded(self) -> dict[str, Any]:
        """The fields that a file has: all that apply to the kind of task and its regime."""
        absent = set() if self.does.per_pixel else {"values", "ignore"}
        absent |= set() if self.parts.side else {"rank"}
        absent |= set() if self.parts.moments else {"layers"}
        # As version 0.1.0 wrote it, which had no other form and no squares.
        absent |= set() if self.parts.side and self.side_form > 1 else {"side_form"}
        absent |= set() if self.parts.moments and self.squares else {"squares"}
        return {name: value for name, value in vars(self).items() if name not in absent}

    def shapes(self, trunk: TrunkShape) -> dict[str, tuple[int, ...]]:
        """What the task learns on such a trunk: the shape of every tensor, by its name.

        A `full` task's own trunk, and what its head finds in the data, are left out.
        """
        parts, width, steps = self.parts, trunk.width, trunk.depth + 1
        head = self.does.head_shapes(
            self.features(trunk), len(self.classes), mlp=parts.mlp, masked=parts.masked
        )
        shapes = {f"head.{name}": shape for name, shape in head.items()}
        if parts.token:
            shapes["class_token"] = (self.tokens, width)
        if parts.side:
            shapes["cells"] = (steps, self.cells, self.rank)
            side = side_shapes(steps, width, self.rank, len(self.extends), self.queries)
            shapes |= {f"side.{name}": shape for name, shape in side.items()}
        elif parts.cells:
            layers = 1 if self.update == "propagate" else trunk.depth
            shapes["cells"] = (layers, self.cells, width)
        if parts.adapters:
            shapes["adapters.down"] = (trunk.depth, 2, width, self.adapter_width)
            shapes["adapters.up"] = (trunk.depth, 2, self.adapter_width, width)
        return shapes

    def statistics(self, trunk: TrunkShape) -> dict[str, tuple[int, ...]]:
        """What a file may hold of the training images: the shape of every tensor, by its name."""
        groups = self.does.groups(len(self.classes))
        shapes = statistics_shapes(groups, self.features(trunk))
        return {PREFIX + name: shape for name, shape in shapes.items()}

    def features(self, trunk: TrunkShape) -> int:
        """How many numbers the head sees: of the image, or of every patch in segmentation."""
        parts, moments = self.parts, 1
        if parts.moments:
            moments = self.layers_read(trunk) * moments_per_layer(trunk.class_token)
            moments += squares_count(trunk.depth) if self.squares else 0
        rows = self.queries + squares_seen(self.side_form, self.queries) or 1
        return moments * trunk.width + (rows * self.rank if parts.side else 0)

    def layers_read(self, trunk: TrunkShape) -> int:
        """Of how many layers a readout sees the moments; the final tokens count as a layer."""
        return min(self.layers or trunk.depth + 1, trunk.depth + 1)

    @property
    def queries(self) -> int:
        """How many queries pool the side patches: none where every patch has an answer."""
        return 0 if self.does.per_pixel else QUERIES

    @property
    def parts(self) -> Regime:
        return REGIMES[self.regime]

    @property
    def does(self) -> Kind:
        return KINDS[self.kind]


def _is_text(name: str) -> bool:
    """Not of bytes that are no UTF-8, which file names can be and Python keeps as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def class_names(classes: int | Sequence[str]) -> tuple[str, ...]:
    if isinstance(classes, str):
        raise EngramError(f"classes is the text {classes!r}; give a number or a list of names.")
    if isinstance(classes, Integral):  # numpy's numbers too
        return tuple(str(i) for i in range(int(classes)))
    if not isinstance(classes, Iterable):
        raise EngramError(f"classes is {classes!r}; give a whole number or a list of names.")
    return tuple(map(str, classes))
