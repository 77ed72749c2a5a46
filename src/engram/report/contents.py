"""Parts of a page, as plain data; `templates/contents.html.j2` has a macro for each type.

Texts are plain text: the templates escape them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engram.report.images import Thumbnail
from engram.util.charts import Chart

MAX_CLASSES = 20  # in a confusion matrix and in a list of classes


class Content:
    """A part of a section, drawn by the macro of its name: `image_table` for `ImageTable`."""

    @property
    def macro(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()


@dataclass(frozen=True)
class Section(Content):
    """A part of the page with a link at its top, or a part of such a section."""

    key: str  # its id in the page
    title: str
    contents: Sequence[Content]


@dataclass(frozen=True)
class Text(Content):
    text: str


@dataclass(frozen=True)
class Facts(Content):
    """Names and values, side by side."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table(Content):
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    highlighted: int | None = None  # a row
    text_columns: int = 1  # the first ones, aligned to the left; the others are numbers


@dataclass(frozen=True)
class Links(Content):
    """Names with the addresses of other pages, relative to this one."""

    pages: Sequence[tuple[str, str]]
    note: str = ""


@dataclass(frozen=True)
class Bar:
    label: str
    share: float  # the length, from 0 to 1
    text: str  # at the end
    style: str = ""  # a CSS class: "plain" or "wrong"


@dataclass(frozen=True)
class Bars(Content):
    bars: Sequence[Bar]
    note: str = ""


@dataclass(frozen=True)
class Charts(Content):
    charts: Sequence[Chart]
    note: str = ""


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong prediction."""

    image: Thumbnail
    path: str
    predicted: Sequence[str]  # labels
    true: Sequence[str]
    output: str = ""  # which of several outputs is wrong
    confidence: str = ""


@dataclass(frozen=True)
class Mistakes(Content):
    mistakes: Sequence[Mistake]
    note: str


@dataclass(frozen=True)
class Picture:
    """An image, and lines about it below."""

    image: Thumbnail
    path: str
    title: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Pictures(Content):
    pictures: Sequence[Picture]
    note: str = ""


@dataclass(frozen=True)
class MatrixCell:
    count: int
    shade: float  # the strength of the colour, from 0 to 1
    style: str  # CSS classes
    title: str


@dataclass(frozen=True)
class Matrix(Content):
    """A confusion matrix: a row for each true class, a column for each predicted one."""

    classes: Sequence[str]
    rows: Sequence[Sequence[MatrixCell]]
    note: str
    tall: bool  # whether the names above the columns are written upwards


@dataclass(frozen=True)
class ImageRow:
    label: str
    images: Sequence[Thumbnail]
    name: str = ""  # of the file, on a second line


@dataclass(frozen=True)
class ImageTable(Content):
    columns: Sequence[str]
    rows: Sequence[ImageRow]
    note: str
    style: str = ""  # a further CSS class
    colours: Sequence[tuple[str, str]] = ()  # what they mean: a name and a CSS colour


@dataclass(frozen=True)
class LayerShares:
    layer: int
    shares: Sequence[tuple[int, float]]  # a part that is read, by its number, and its share
    text: str  # at the end


@dataclass(frozen=True)
class AttentionShares(Content):
    """Shares of a class token's attention, layer by layer."""

    parts: Sequence[str]  # names by number
    layers: Sequence[LayerShares]
    note: str
