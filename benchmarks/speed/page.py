"""speed.md: every table of a run, the targets, and the rows where another method is faster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.report import markdown_table
from benchmarks.speed.busy import SERVICE, SOLVING, STEP
from benchmarks.speed.command import IN_FOLDS
from benchmarks.speed.measure import ROUTED, SIDE_STEP
from engram.experiments.bench import PLAIN
from engram.experiments.timing import describe_machine

Found = Mapping[str, Mapping[str, Any]]
Row = Mapping[str, Any]

# (section, what identifies the row, the ratio to reach, its label in the table)
TARGETS: list[tuple[str, dict[str, Any], float, str]] = [
    ("forward", {"what": "engram", "tasks": 10, "batch": 16}, 1.25, "10 tasks, batch 16"),
    ("forward", {"what": "engram", "tasks": 10, "batch": 1}, 1.28, "10 tasks, batch 1"),
    ("forward", {"what": "engram", "tasks": 100, "batch": 16}, 2.9, "100 tasks, batch 16"),
    ("training", {"what": "engram", "batch": 16}, 1.25, "a training step, batch 16"),
    (
        "training",
        {"what": "engram, from the cache", "batch": 128},
        0.08,
        "a step from the cache, batch 128",
    ),
    (
        "training",
        {"what": "engram, from the cache", "batch": 16},
        0.20,
        "a step from the cache, batch 16",
    ),
    (
        "sweep",
        {"what": "engram, one pass", "backbone": "ViT-Ti/16"},
        0.35,
        "16 variants in one pass, ViT-Ti/16",
    ),
    (
        "sweep",
        {"what": "engram, one pass", "backbone": "ViT-B/32"},
        0.80,
        "16 variants in one pass, ViT-B/32",
    ),
    *(
        (
            "side",
            {"what": what, "backbone": "ViT-B/32", "tasks": count, "batch": 16},
            ratio,
            f"{count:,} {what} tasks, batch 16",
        )
        for what, count, ratio in (
            ("side", 10, 1.08),
            ("side", 100, 1.5),
            ("side", 1000, 5.0),
            ("readout", 1000, 1.35),
        )
    ),
    (
        "route",
        {"what": f"masked{ROUTED}", "tasks": 100, "batch": 16},
        1.10,
        "100 tasks, one asked of each image, batch 16",
    ),
    (
        "side",
        {"what": SIDE_STEP, "backbone": "ViT-B/32", "batch": 128},
        0.04,
        "a step of a side task from the cache, batch 128",
    ),
    (
        "side",
        {"what": SIDE_STEP, "backbone": "ViT-Ti/16", "tasks": 16},
        1.5,
        "16 side variants in one pass, ViT-Ti/16",
    ),
    *(
        (
            "command",
            {"what": f"engram fit, {regime}", "backbone": backbone},
            ratio,
            f"`engram fit --regime {regime}`, the whole command, {backbone}",
        )
        for regime, backbone, ratio in (
            ("masked", "ViT-Ti/16", 1.8),
            ("auto", "ViT-Ti/16", 3.0),
            ("auto", "DINOv2-small", 3.0),
        )
    ),
    (
        "folds",
        {"what": IN_FOLDS},
        1.6,
        "`engram fit` in five folds, relative to one share, mean of datasets",
    ),
]
TARGET_BACKBONE = "ViT-B/32"  # for targets that name no other
MEMORY_TARGET = 0.20  # of the same step with gradients through the backbone
THROUGH = "engram, gradients through the backbone"

_ONE_TASK = "it answers that task only, while Engram also answers base, with one more token"
_SMALL = (
    "the tasks' attention is a second attention operation, which one masked attention does not "
    "need (its small operations were 3.5 % of a pass at batch 1)"
)
WHY_LOST = {
    ("separate models", 1): f"one separate model is the plain backbone; {_ONE_TASK}",
    ("PEFT LoRA", 1): f"an adapter adds no token; {_ONE_TASK}",
    ("vit-pytorch", 1): _ONE_TASK,
    ("straightforward", 1): _SMALL,
    ("straightforward", 10): _SMALL,
}
_HEADER = (
    "the tensors are the same size; an engram also has a header (classes, backbone, fingerprint, "
    "preprocessing, lineage)"
)


#: Sections that need quiet minutes of their own, or the assets: the page is written without them.
LATER = {"side", "route", "command", "folds", "busy", "memory", "start"}


def page(found: Found) -> str:
    first = next(iter(found.values()))
    return "\n".join(
        [
            "# Speed compared with other methods",
            "",
            *_about(found),
            "",
            "## Targets",
            "",
            *_targets(found),
            "",
            "## Forward",
            "",
            *_forward(found["forward"]),
            "",
            "## One training step",
            "",
            *_training(found["training"]),
            "",
            "## Many variants",
            "",
            *_sweep(found["sweep"]),
            "",
            "## Side network and readouts",
            "",
            *_side(found.get("side", {"rows": []})),
            "",
            "## A task per image",
            "",
            *_route(found.get("route", {"rows": []})),
            "",
            "## The whole command",
            "",
            *_command(found.get("command", {"rows": []})),
            "",
            "## Folds",
            "",
            *_folds(found.get("folds", {"rows": []})),
            "",
            "## Beside other work",
            "",
            *_busy(found.get("busy", {"rows": []})),
            "",
            "## Memory of whole commands",
            "",
            *_memory(found.get("memory", {"rows": []})),
            "",
            "## Start",
            "",
            *_start(found.get("start", {"rows": []})),
            "",
            "## What is stored for a task",
            "",
            *_storage(found["storage"]),
            "",
            "## Growth",
            "",
            *_growth(found["growth"]),
            "",
            "## How it was measured",
            "",
            f"`python -m benchmarks.speed` on {describe_machine(first['machine'])}. "
            "All methods run in turn in one process, round after round. A ratio is relative to the "
            "plain backbone's forward pass on the same images in the same round; the table gives "
            "its median and its quartiles. Weights are random, inference runs in `inference_mode`, "
            "and all methods use SDPA except vit-pytorch, which has its own attention code. "
            "Separate models, vit-pytorch and LoRA answer one task per pass and nothing for base. "
            "Their passes are all alike, so only some of them are run in a round and the time is "
            "multiplied (†). Steps from the cache at the large batch are measured four in a row, "
            "because in training they follow each other, and a step is the mean of the four. The "
            "numbers are in `benchmarks/results/speed/`.",
            "",
        ]
    )


def _about(found: Found) -> list[str]:
    took = sum(section["took"] for section in found.values())
    dates = sorted({section["date"] for section in found.values()})
    machines = {describe_machine(section["machine"]) for section in found.values()}
    lines = [f"Measured on {' and '.join(dates)} in {took / 60:.0f} minutes."]
    small = [name for name, section in found.items() if section["plan"] != "full"]
    if small:
        lines.append(
            f"**Not valid as results, from a small backbone and few rounds: {', '.join(small)}.**"
        )
    hasty = {
        name: section["haste"] for name, section in found.items() if section.get("haste", 1) != 1
    }
    if hasty:
        words = ", ".join(f"{name} (1/{haste:g})" for name, haste in hasty.items())
        lines.append(f"**Measured in a fraction of the usual time, with fewer rounds: {words}.**")
    if len(machines) > 1:
        lines.append("**The sections were not measured under the same conditions.**")
    return [*lines, "", "![Forward, training and memory of every method.](speed/speed.svg)"]


def pick(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The first row with all of these values."""
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    return None


# Targets


def _targets(found: Found) -> list[str]:
    rows = []
    for section, wanted, target, words in TARGETS:
        measured_there = found.get(section, {"rows": []})
        row = pick(measured_there["rows"], **wanted)
        if row is None or measured_there.get("backbone", TARGET_BACKBONE) != TARGET_BACKBONE:
            rows.append([words, f"{target:g}", "not measured", "", "", ""])
            continue
        limit = "" if row["limit"] is None else f"{row['limit']:.3g}"
        measured = [f"{row['ratio']:.3g}", _range(row), limit, _verdict(row, target)]
        rows.append([words, f"{target:g}", *measured])
    share = memory_share(found)
    if share is not None and found["training"]["backbone"] == TARGET_BACKBONE:
        verdict = "reached" if share <= MEMORY_TARGET else "**missed**"
        words = "memory of a training step, relative to one with gradients through the backbone"
        rows.append([words, f"{MEMORY_TARGET:g}", f"{share:.2f}", "", "", verdict])
    return markdown_table(("", "target", "measured", "quartiles", "by FLOPs", ""), rows)


def _verdict(row: Row, target: float) -> str:
    if row["ratio"] <= target:
        return "reached"
    if row["limit"] is not None and row["limit"] > target:
        return f"**missed**: by FLOPs it is {row['limit']:.2f}"
    if row["low"] <= target:
        return "**missed**, within the spread"
    return "**missed**"


def memory_share(found: Found) -> float | None:
    rows = found["training"]["rows"]
    ours, through = pick(rows, what="engram"), pick(rows, what=THROUGH)
    if ours is None or through is None or "peak" not in ours or "peak" not in through:
        return None
    share: float = ours["peak"] / through["peak"]
    return share


# Sections


def _forward(section: Mapping[str, Any]) -> list[str]:
    rows = section["rows"]
    counts = sorted({row["tasks"] for row in rows if row["tasks"]})
    lines = [
        f"{section['backbone']}, {section['cells']} cells per task, ratio to the plain backbone."
    ]
    lost: list[str] = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        here = [row for row in rows if row["batch"] == batch]
        plain = pick(here, what=PLAIN)
        assert plain is not None
        lines += ["", f"Batch {batch} (the plain backbone: {1e3 * plain['seconds']:,.0f} ms)", ""]
        lines += _forward_table(here, counts)
        other = pick(here, what="transformers, plain")
        if other:
            ratio = f"{other['ratio']:.2f} ({_range(other)})"
            lines += ["", f"The plain ViT of transformers, of the same shape: {ratio}."]
        lost += _lost(here, f"batch {batch}")
    return [*lines, "", *(lost or ["No other method is faster in any row."])]


def _forward_table(rows: Sequence[Row], counts: Sequence[int]) -> list[str]:
    table = []
    for what in dict.fromkeys(row["what"] for row in rows if row["tasks"]):
        cells = [pick(rows, what=what, tasks=count) for count in counts]
        table.append([what, *(_cell(cell) if cell else "" for cell in cells)])
    limits = [pick(rows, what="engram", tasks=count) for count in counts]
    table.append(["*by FLOPs*", *(f"{row['limit']:.2f}" if row else "" for row in limits)])
    return markdown_table(("", *map(_tasks, counts)), table)


def _lost(rows: Sequence[Row], where: str) -> list[str]:
    """The methods that are faster, and why."""
    lines = []
    for row in rows:
        ours = pick(rows, what="engram", tasks=row["tasks"])
        peer = row["what"] in ("straightforward", "separate models", "vit-pytorch", "PEFT LoRA")
        if not ours or not peer or row["ratio"] >= ours["ratio"]:
            continue
        near = row["high"] >= ours["low"]
        reason = WHY_LOST.get((row["what"], row["tasks"]))
        if reason is None:
            reason = "the reason is not known"
        if near:
            reason = f"within the spread; {reason}"
        lines.append(
            f"- **Lost**: {_tasks(row['tasks'])}, {where}, to {row['what']} "
            f"({row['ratio']:.3f} against {ours['ratio']:.3f}): {reason}."
        )
    return lines


def _training(section: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{section['backbone']}, one task of {section['cells']} cells, AdamW: forward, backward "
        "and update, relative to the plain backbone's forward pass on the same images. Memory is "
        "the peak by which a separate process grows during the step.",
        "",
    ]
    rows = []
    for row in section["rows"]:
        memory = f"{row['peak'] / 1e6:,.0f}" if "peak" in row else ""
        time = [f"{row['ratio']:.3f}", _range(row), f"{1e3 * row['seconds']:,.0f}"]
        rows.append([row["what"], str(row["batch"]), *time, memory])
    lines += markdown_table(("", "batch", "ratio", "quartiles", "ms", "memory, MB"), rows)
    ours = pick(section["rows"], what="engram")
    assert ours is not None
    peers = [row for row in section["rows"] if row["what"] != PLAIN and row["what"][:6] != "engram"]
    lost = [
        f"- **Lost** {words} to {row['what']}; the reason is not known."
        for row in peers
        for key, words in (("ratio", "in time"), ("peak", "in memory"))
        if key in row and row[key] < ours[key]
    ]
    return [*lines, "", *(lost or ["No other method needs less time or less memory."])]


def _sweep(section: Mapping[str, Any]) -> list[str]:
    variants = section["rows"][0]["tasks"]
    lines = [
        f"One training step of {variants} variants of a task, all in one pass or one run after the "
        "other, relative to the plain backbone's forward pass.",
        "",
    ]
    rows = []
    for row in section["rows"]:
        limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
        what = f"{row['what']}{'†' if row['note'] else ''}"
        about = [what, row["backbone"], str(row["batch"])]
        rows.append([*about, f"{row['ratio']:.3g}", _range(row), limit])
    lines += markdown_table(("", "backbone", "batch", "ratio", "quartiles", "by FLOPs"), rows)
    for backbone in dict.fromkeys(row["backbone"] for row in section["rows"]):
        here = [row for row in section["rows"] if row["backbone"] == backbone]
        one = pick(here, what="engram, one pass")
        assert one is not None
        gains = [
            f"{row['ratio'] / one['ratio']:.1f} times as fast as {row['what'].replace(',', '')}"
            for row in here
            if row["what"] not in (PLAIN, "engram, one pass")
        ]
        lines += ["", f"On {backbone} one pass is {', '.join(gains)}."]
    return lines


def _side(section: Mapping[str, Any]) -> list[str]:
    if not section["rows"]:
        return ["Not measured yet (`--only side`)."]
    lines = [
        "Many tasks of rank 16 in one pass, and training steps (forward, backward and update) of "
        "one task or several variants from the cache, relative to the plain backbone's forward "
        "pass.",
        "",
    ]
    return [*lines, *_timed(section["rows"])]


def _route(section: Mapping[str, Any]) -> list[str]:
    if not section["rows"]:
        return ["Not measured yet (`--only route`)."]
    lines = [
        "Many tasks attached, of which each image of a batch is asked for another one "
        "(`route=`), or all for every image, relative to the plain backbone. The route is drawn "
        "anew for every pass.",
        "",
    ]
    return [*lines, *_timed(section["rows"])]


def _timed(rows: Sequence[Row]) -> list[str]:
    """A table of passes and steps with their backbones."""
    table = []
    for row in rows:
        tasks = f"{row['tasks']:,}" if row["what"] != PLAIN else ""
        about = [row["what"], row["backbone"], tasks, str(row["batch"])]
        time = [f"{row['ratio']:.3g}", _range(row), f"{1e3 * row['seconds']:,.0f}"]
        table.append([*about, *time, f"{row['limit']:.3g}"])
    head = ("", "backbone", "tasks", "batch", "ratio", "quartiles", "ms", "by FLOPs")
    return markdown_table(head, table)


def _command(section: Mapping[str, Any]) -> list[str]:
    rows = section["rows"]
    if not rows:
        return ["Not measured yet: it needs the assets folder (`--only command`)."]
    lines = [
        "The whole command, from its start to its report, with an empty cache, relative to one "
        "plain pass over the same photographs, decoding included; without such a row, relative to "
        "the first command. One run of each.",
        "",
    ]
    table = [
        [row["backbone"], f"{row['batch']:,}", row["what"], f"{row['ratio']:.2f}",
         f"{row['seconds']:,.0f}"]
        for row in rows
    ]  # fmt: skip
    head = ("backbone", "photographs", "", "ratio", "seconds")
    return [*lines, *markdown_table(head, table)]


def _folds(section: Mapping[str, Any]) -> list[str]:
    if not section["rows"]:
        return ["Not measured yet: it needs the assets folder (`--only folds`)."]
    lines = [
        "`engram fit --folds 5`, the whole command on a ViT-Ti/16 with an empty cache, relative to "
        "`--folds 1`, which holds one share out. One run of each; with up to 330 images, five "
        "folds are the default.",
        "",
    ]
    table = [
        [row["what"], str(row["batch"] or ""), f"{row['ratio']:.2f}", f"{row['seconds']:,.0f}"]
        for row in section["rows"]
    ]
    return [*lines, *markdown_table(("", "images", "ratio", "seconds"), table)]


#: How many times as long a row may take beside one and two busy threads.
BUSY_TARGETS = {STEP: (1.8, 2.5), SOLVING: (1.5, 2.0), SERVICE: (2.0, None)}
#: Passes of many tasks beside one busy thread: relative to the plain pass, and to their own ratio.
SIDE_BUSY, MASKED_BUSY = 1.6, 1.15


def _busy(section: Mapping[str, Any]) -> list[str]:
    if not section["rows"]:
        return ["Not measured yet (`--only busy`)."]
    lines = [
        f"{section['backbone']} (heads are solved on a ViT-Ti/16, the service answers with pico): "
        "time alone, and how many times that it takes while other programs keep one or two "
        f"threads busy. Medians of {section['rounds']} rounds, with quartiles.",
        "",
    ]
    table = []
    for row in section["rows"]:
        cells = [f"{one['ratio']:.2f} ({_range(one)})" for one in row["loads"][1:]]
        targets = BUSY_TARGETS.get(row["what"], ())
        shown = " / ".join(f"{target:g}" for target in targets if target)
        table.append([row["what"], f"{1e3 * row['seconds']:,.1f}", *cells, shown])
    lines += markdown_table(("", "alone, ms", "one busy", "two busy", "target"), table)
    table = []
    for name, ratios in section["plain"].items():
        target = SIDE_BUSY if "side" in name else MASKED_BUSY * ratios[0]
        table.append([name, *(f"{ratio:.2f}" for ratio in ratios), f"{target:.2f}"])
    head = ("relative to the plain pass", "alone", "one busy", "two busy", "target with one")
    return [*lines, "", *markdown_table(head, table)]


def _memory(section: Mapping[str, Any]) -> list[str]:
    if not section["rows"]:
        return ["Not measured yet (`--only memory`)."]
    rows = [[row["what"], f"{row['peak'] / 1e6:,.0f}", f"{row['own'] / 1e6:,.0f}"]
            for row in section["rows"]]  # fmt: skip
    return [
        f"{section['backbone']}, {section['tasks']} tasks, {section['images']} images. The peak of "
        "all processes of a command together, memory that they share counted once; that of its "
        "first process alone. Sampled ten times a second.",
        "",
        *markdown_table(("", "all processes, MB", "the first, MB"), rows),
    ]


START_TARGETS = {"`engram --help`": 0.3, '`engram.load_backbone("pico")`': 1.3}


def _start(section: Mapping[str, Any]) -> list[str]:
    if not section["rows"]:
        return ["Not measured yet (`--only start`)."]
    rows = [
        [row["what"], f"{row['seconds']:.2f}", f"{row['ratio']:.2f} ({_range(row)})",
         f"{START_TARGETS[row['what']]:g}" if row["what"] in START_TARGETS else ""]
        for row in section["rows"]
    ]  # fmt: skip
    about = 'A new process, in turns, relative to `python -c "import torch"`.'
    head = ("", "seconds", "ratio", "target")
    return [about, "", *markdown_table(head, rows)]


def _storage(section: Mapping[str, Any]) -> list[str]:
    ours = pick(section["rows"], what="engram")
    assert ours is not None
    lines = [
        f"{section['backbone']}, {section['cells']} cells, {section['classes']} classes, fp32. The "
        "engrams are without the statistics of training images that `engram fit` adds.",
        "",
    ]
    rows = [
        [row["what"], f"{row['bytes'] / 1e3:,.1f}", f"{row['bytes'] / ours['bytes']:,.2f}"]
        for row in section["rows"]
    ]
    lines += markdown_table(("", "KB", "relative to an engram"), rows)
    for row in section["rows"]:
        if row["bytes"] < ours["bytes"] and not row["what"].startswith("engram"):
            lines += ["", f"- **Lost** to {row['what']}: {_HEADER}."]
    per_image = section["cache_row"] / 1e6
    return [*lines, "", f"The cache stores {per_image:.2f} MB per image, for all tasks."]


def _growth(section: Mapping[str, Any]) -> list[str]:
    last = section["last"]
    lines = [
        "![Time over tasks, images, cells and width.](speed/growth.svg)",
        "",
        "The slope of log time over log size, and the same slope of the multiply-accumulates that "
        "`engram.tasks.costs` counts: over all points, and over the "
        f"last {last}.",
        "",
    ]
    head = ("what grows", "from, to", "measured", "predicted", "measured, last",
            "predicted, last", "setting")  # fmt: skip
    rows = []
    for what, grown in section["of"].items():
        xs = [point["x"] for point in grown["points"]]
        slopes = ("measured", "predicted", "measured_last", "predicted_last")
        exponents = [f"{grown[slope]:.2f}" for slope in slopes]
        rows.append([what, f"{xs[0]}, {xs[-1]}", *exponents, grown["about"]])
    return [*lines, *markdown_table(head, rows)]


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"


def _range(row: Row) -> str:
    return f"{row['low']:.3g} to {row['high']:.3g}"


def _cell(row: Row) -> str:
    mark = "†" if row["note"] else ""
    return f"{row['ratio']:.2f}{mark} ({row['low']:.2f} to {row['high']:.2f})"
