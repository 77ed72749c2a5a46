"""Draw the SVG images of docs/explanation.md into docs/images.

    python -m scripts.draw_docs

Every image has its own background and follows the reader's light or dark mode.
"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"

STYLE = """
    .panel { fill: #ffffff; stroke: #d0d7de; }
    .box { fill: #f6f8fa; stroke: #afb8c1; }
    .text { fill: #1f2328; }
    .soft { fill: #59636e; font-size: 14px; }
    .name { font-weight: 600; font-size: 17px; }
    .token { fill: #ffffff; stroke-width: 2.5; }
    .gone { stroke-dasharray: 3 3; opacity: 0.55; }
    .arrow { fill: none; stroke-width: 2; }
    .backbone { stroke: #57606a; } .flowers { stroke: #1a7f37; } .roses { stroke: #bf3989; }
    .tip { fill: #57606a; }
    .no { fill: #eaeef2; } .by-backbone { fill: #8c959f; }
    .by-flowers { fill: #2da44e; } .by-roses { fill: #d0579f; }
    .star { fill: none; stroke: #1f2328; stroke-width: 2.5; }
    @media (prefers-color-scheme: dark) {
      .panel { fill: #0d1117; stroke: #30363d; }
      .box { fill: #161b22; stroke: #484f58; }
      .text { fill: #e6edf3; }
      .soft { fill: #9da7b1; }
      .token { fill: #0d1117; }
      .backbone { stroke: #9da7b1; } .flowers { stroke: #3fb950; } .roses { stroke: #f778ba; }
      .tip { fill: #9da7b1; }
      .no { fill: #21262d; } .by-backbone { fill: #848d97; }
      .by-flowers { fill: #2ea043; } .by-roses { fill: #c9569a; }
      .star { stroke: #e6edf3; }
    }
"""

TIP = (
    '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
    'orient="auto"><path class="tip" d="M0 0 10 5 0 10z"/></marker>'
)


def picture(width: int, height: int, title: str, about: str, parts: list[str]) -> str:
    inside = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="title desc"\n     font-family="system-ui, -apple-system, \'Segoe UI\', '
        '\'DejaVu Sans\', sans-serif" font-size="15">\n'
        f'  <title id="title">{title}</title>\n  <desc id="desc">{about}</desc>\n'
        f"  <style>{STYLE}  </style>\n  <defs>{TIP}</defs>\n"
        f'  <rect class="panel" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/>\n'
        f"  {inside}\n</svg>\n"
    )


def label(x: float, y: float, text: str, style: str = "text", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def box(x: float, y: float, width: float, height: float, text: str = "") -> str:
    drawn = f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'
    return drawn + (label(x + width / 2, y + height / 2 + 5, text, anchor="middle") if text else "")


def arrow(path: str, style: str = "backbone") -> str:
    return f'<path class="arrow {style}" marker-end="url(#tip)" d="{path}"/>'


def cell(x: float, y: float, style: str, text: str = "") -> str:
    """A memory cell or a patch: a small square."""
    drawn = f'<rect class="token {style}" x="{x}" y="{y}" width="26" height="26"/>'
    return drawn + (label(x + 13, y + 18, text, anchor="middle") if text else "")


def token(x: float, y: float, style: str, text: str) -> str:
    """A class token: a circle, its left edge at x, as high as a cell."""
    drawn = f'<circle class="token {style}" cx="{x + 16}" cy="{y + 13}" r="17"/>'
    return drawn + (
        f'<text class="text" x="{x + 16}" y="{y + 17}" text-anchor="middle" font-size="12">'
        f"{text}</text>"
    )


def stream(x: float, y: float) -> list[str]:
    """The tokens that travel: class token and patches of the ViT, class tokens of two tasks."""
    return [
        token(x, y, "backbone", "CLS"),
        *(cell(x + 46 + 34 * i, y, "backbone") for i in range(4)),
        token(x + 192, y, "flowers", "C₁"),
        token(x + 238, y, "roses", "C₂"),
    ]


def memory(x: float, y: float, gone: str = "") -> list[str]:
    """The cells of two tasks."""
    return [
        *(cell(x + 32 * i, y, f"flowers {gone}") for i in range(3)),
        *(cell(x + 110 + 32 * i, y, f"roses {gone}") for i in range(3)),
    ]


def layer() -> str:
    parts = [
        label(30, 40, "one layer, from top to bottom", "text name"),
        label(30, 78, "the stream", "soft"),
        *stream(30, 92),
        label(360, 78, "this layer's cells: M₁ of flowers, M₂ of roses", "soft"),
        *memory(360, 92),
        box(30, 158, 530, 36, "LayerNorm, the same for tokens and cells"),
        arrow("M166 132V154"),
        arrow("M462 132V154"),
        box(30, 232, 300, 36, "queries"),
        box(350, 232, 210, 36, "keys and values"),
        arrow("M166 194V228"),
        arrow("M300 194C330 214 360 214 392 228"),
        arrow("M462 194V228"),
        label(576, 247, "Tokens give all three.", "soft"),
        label(576, 267, "Cells give no queries.", "soft"),
        box(30, 306, 530, 36, "attention, where Table 1 allows it"),
        arrow("M166 268V302"),
        arrow("M462 268V302"),
        label(576, 329, "Cells get no output.", "soft"),
        box(30, 380, 300, 36, "residual, LayerNorm, MLP, residual"),
        arrow("M166 342V376"),
        arrow("M462 342V380"),
        *memory(360, 390, "gone"),
        label(576, 408, "The cells are dropped.", "soft"),
        *stream(30, 450),
        arrow("M166 416V440"),
        label(360, 468, "to the next layer, which has its own cells", "soft"),
    ]
    about = (
        "The tokens of the ViT and of two tasks and the cells of this layer go through the same "
        "norm. Tokens give queries; tokens and cells give keys and values. After attention the "
        "tokens go through residual and MLP to the next layer; the cells are dropped."
    )
    return picture(760, 506, "One layer", about, parts)


ROWS = ["patch", "patch", "patch", "CLS", "C₁", "C₂"]
COLUMNS = [*ROWS, "M₁", "M₁", "M₁", "M₂", "M₂", "M₂"]


def reads(reader: str, read: str, extends: bool) -> bool:
    """Table 1."""
    if read in ("patch", "CLS"):
        return True
    if reader == "C₁":
        return read in ("C₁", "M₁")
    return reader == "C₂" and (read in ("C₂", "M₂") or extends)


def matrix(x: float, y: float, extends: bool) -> list[str]:
    styles = {"C₁": "by-flowers", "C₂": "by-roses"}
    drawn = []
    for i, reader in enumerate(ROWS):
        drawn.append(label(x - 10, y + 28 * i + 19, reader, anchor="end"))
        for j, read in enumerate(COLUMNS):
            style = styles.get(reader, "by-backbone") if reads(reader, read, extends) else "no"
            place = f'x="{x + 28 * j}" y="{y + 28 * i}" width="25" height="25" rx="3"'
            drawn.append(f'<rect class="{style}" {place}/>')
            if extends and reads(reader, read, True) and not reads(reader, read, False):
                drawn.append(f'<rect class="star" {place}/>')
    for name, first, count in (("patches", 0, 3), ("CLS", 3, 1), ("C₁", 4, 1), ("C₂", 5, 1),
                               ("cells M₁", 6, 3), ("cells M₂", 9, 3)):  # fmt: skip
        drawn.append(label(x + 28 * (first + count / 2) - 1.5, y - 10, name, "soft", "middle"))
    return drawn


def masks() -> str:
    parts = [
        label(30, 40, "concatenation: flowers and roses side by side", "text name"),
        *matrix(90, 88, extends=False),
        label(520, 40, "extension: roses extends flowers", "text name"),
        *matrix(580, 88, extends=True),
        label(30, 292, "Rows are queries, columns are keys. Filled: the row may read the column."),
        label(
            30, 316,
            "The upper four rows, the ViT itself, are the same in both, and the same as without "
            "any task.", "soft",
        ),
        label(
            30, 338,
            "Outlined: what extension adds. The row of C₁ is the same in both: being read changes "
            "nothing.", "soft",
        ),
    ]  # fmt: skip
    about = (
        "Two matrices that show which token reads which. In both, patches and the ViT's class "
        "token read only each other, and C1 reads the ViT, itself and its cells M1. C2 reads the "
        "ViT, itself and M2; where it extends flowers, it also reads C1 and M1."
    )
    return picture(950, 360, "Which token reads which, as a matrix", about, parts)


def fresh() -> str:
    parts = [label(30, 40, "an image through all layers", "text name")]
    y = 62
    for number, name in enumerate(("layer 1", "layer 2", "…", "layer 12")):
        top = y + 92 * number
        parts += stream(30, top)
        parts += [arrow(f"M166 {top + 34}V{top + 52}"), box(30, top + 54, 300, 30, name)]
        if name != "…":
            parts += memory(430, top + 56)
            parts += [arrow(f"M424 {top + 69}H336")]
            text = f"cells of {name}" if number else "cells of layer 1: learned, the same"
            parts.append(label(648, top + 74 - (9 if not number else 0), text, "soft"))
            if not number:
                parts.append(label(648, top + 84, "for every image", "soft"))
    bottom = y + 4 * 92
    parts += [
        *stream(30, bottom),
        arrow(f"M46 {bottom + 34}V{bottom + 58}"),
        arrow(f"M238 {bottom + 34}V{bottom + 58}", "flowers"),
        arrow(f"M284 {bottom + 34}V{bottom + 58}", "roses"),
        box(14, bottom + 60, 70, 32, "base"),
        box(152, bottom + 60, 104, 32, "flowers"),
        box(264, bottom + 60, 80, 32, "roses"),
        label(372, bottom + 81, "one head each: three answers in one pass", "soft"),
    ]
    about = (
        "The stream of tokens goes through twelve layers. Every layer reads cells of its own, "
        "which come from the side and go no further. At the end the ViT's class token answers for "
        "base, C1 for flowers and C2 for roses."
    )
    return picture(900, 548, "Cells are fresh at every layer", about, parts)


def column(x: float, title: str, lines: list[str]) -> list[str]:
    """The title above and the text below one of the three columns."""
    texts = [label(x, 262 + 22 * i, line, "soft") for i, line in enumerate(lines)]
    return [label(x, 40, title, "text name"), *texts]


def backbone_tokens(x: float, y: float) -> list[str]:
    return [
        token(x, y, "backbone", "CLS"),
        *(cell(x + 46 + 34 * i, y, "backbone") for i in range(4)),
    ]


def fast_path() -> list[str]:
    lines = [
        "All tokens in one sequence: the large",
        "matrix products of a layer run once.",
        "Within 1e-5 of each answer alone.",
    ]
    return [
        *column(30, "fast (the default)", lines),
        *stream(30, 66),
        box(30, 120, 270, 40, "a layer, all tokens at once"),
        arrow("M166 104V116"),
        arrow("M166 160V186"),
        *stream(30, 192),
    ]


def exact_path() -> list[str]:
    lines = [
        "The ViT runs alone, as if there were",
        "no tasks; each task runs separately.",
        "Bit for bit the same, and slower.",
    ]
    return [
        *column(350, "exact=True", lines),
        *backbone_tokens(350, 66),
        box(350, 120, 180, 40, "the plain layer"),
        arrow("M440 104V116"),
        token(544, 66, "flowers", "C₁"),
        token(592, 66, "roses", "C₂"),
        box(544, 120, 82, 40, "tasks"),
        arrow("M560 104V116", "flowers"),
        arrow("M608 104V116", "roses"),
        arrow("M530 140H541"),
        arrow("M440 160V186"),
        arrow("M560 160V186", "flowers"),
        arrow("M608 160V186", "roses"),
        *backbone_tokens(350, 192),
        token(544, 192, "flowers", "C₁"),
        token(592, 192, "roses", "C₂"),
    ]


def cached_path() -> list[str]:
    lines = [
        "What the plain layers feed to a task is",
        "on disk. Only the task's own token runs,",
        "and only it has gradients.",
    ]
    return [
        *column(670, "training, from the cache", lines),
        f'<g class="gone">{"".join(backbone_tokens(670, 66))}</g>',
        box(670, 120, 180, 40, "stored once"),
        token(880, 66, "flowers", "C₁"),
        box(866, 120, 62, 40, "task"),
        arrow("M896 104V116", "flowers"),
        arrow("M850 140H863"),
        arrow("M896 160V186", "flowers"),
        token(880, 192, "flowers", "C₁"),
    ]


def paths() -> str:
    about = (
        "Three ways to compute the same. Fast: all tokens go through a layer together. Exact: the "
        "plain layer runs alone and each task runs separately. Training: what the plain layer "
        "feeds to tasks comes from disk and only the task's token is computed."
    )
    parts = [*fast_path(), *exact_path(), *cached_path()]
    return picture(960, 330, "Three ways to compute the same", about, parts)


def thin(x: float, y: float, style: str) -> str:
    """A vector of a side network, or a cell of its width."""
    return f'<rect class="token {style}" x="{x}" y="{y}" width="11" height="26"/>'


def readout_column(top: int, pitch: int, head: int) -> list[str]:
    """Three moments of the tokens that enter every layer, and of the last ones, to one head."""
    parts = [
        label(30, 40, "readout (roses)", "text name"),
        label(30, 64, "c: class token; μ, σ: mean and deviation", "soft"),
        label(30, 82, "of the patches; only a head trains", "soft"),
    ]
    for y in range(top, top + 4 * pitch, pitch):
        moments = zip((130, 166, 202), ("c", "μ", "σ"), strict=True)
        parts += [cell(x, y, "roses", text) for x, text in moments]
        parts += [arrow(f"M372 {y + 13}H236", "roses")]
        parts += [f'<path class="arrow roses" d="M126 {y + 13}H80"/>']
    return [*parts, arrow(f"M80 {top + 13}V{head - 4}", "roses"), box(30, head, 100, 32, "roses")]


def side_column(top: int, pitch: int, head: int) -> list[str]:
    """A thin row for every token, which takes it in, reads its cells and goes on."""
    parts = [
        label(650, 40, "side network (flowers)", "text name"),
        label(650, 64, "a thin row for every token takes it in,", "soft"),
        label(650, 82, "then reads their mean and its cells", "soft"),
    ]
    for step, y in enumerate(range(top, top + 4 * pitch, pitch)):
        dots = step == 2
        parts += [thin(650 + 19 * i, y, "flowers") for i in range(5)]
        parts += [
            arrow(f"M562 {y + 13}H642", "flowers"),
            arrow(f"M694 {y + 30}V{y + 44}", "flowers"),
        ]
        parts += [box(640, y + 48, 180, 30, "…" if dots else "attention, MLP")]
        parts += [arrow(f"M694 {y + 78}V{y + pitch - 6}", "flowers")]
        if not dots:
            parts += [thin(850 + 19 * i, y + 50, "flowers") for i in range(3)]
            parts += [arrow(f"M846 {y + 63}H824", "flowers")]
            parts += [label(850, y + 94, "its cells", "soft")] if not step else []
    pool = top + 4 * pitch
    return [
        *parts,
        box(640, pool, 180, 30, "8 queries, a 4 x 4 grid"),
        arrow(f"M694 {pool + 30}V{head - 4}", "flowers"),
        box(640, head, 180, 32, "flowers"),
    ]


def side() -> str:
    top, pitch, head = 116, 100, 576
    parts = [*readout_column(top, pitch, head), *side_column(top, pitch, head)]
    parts += [label(380, 40, "the ViT, as it is", "text name")]
    for step, name in enumerate(("layer 1", "layer 2", "…", "")):
        y = top + pitch * step
        parts += backbone_tokens(380, y)
        if name:
            parts += [arrow(f"M466 {y + 32}V{y + 44}"), box(380, y + 48, 176, 30, name)]
            parts += [arrow(f"M466 {y + 78}V{y + pitch - 6}")]
    last = top + 3 * pitch
    parts += [
        label(420, last + 54, "the last tokens, normed", "soft"),
        arrow(f"M396 {last + 34}V{head - 4}"),
        arrow(f"M396 {head - 36}H610V{head + 16}H636"),
        box(352, head, 88, 32, "base"),
        label(
            30,
            head + 68,
            "Every arrow leaves the ViT and none goes back, so its tokens stay as they are.",
            "soft",
        ),
    ]
    about = (
        "The ViT in the middle runs as without tasks. On the right, a side network: a thin row for "
        "every token takes in the tokens that enter each layer, reads the mean of the rows and "
        "cells of its own, and goes on; after the last step eight queries and a 4 x 4 grid of "
        "the picture pool the rows for the head, which also sees the ViT's class token. On the "
        "left, a readout: the class token, the mean and the standard deviation of the patches at "
        "every layer go to one linear head."
    )
    return picture(960, head + 90, "Side network and readout", about, parts)


PICTURES = {
    "layer.svg": layer,
    "masks.svg": masks,
    "fresh.svg": fresh,
    "paths.svg": paths,
    "side.svg": side,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
