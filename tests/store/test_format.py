"""The file of an engram: the same bytes every time, and nothing that is damaged is read."""

import hashlib
import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.support.damage import (
    DAMAGE,
    Originals,
    flipped,
    huge,
    joined,
    odd_json,
    other_header,
    sealed,
    split,
    with_content,
)
from tests.support.engrams import familiar, randomised, small_trunk
from tests.support.errors import refuses
from tests.support.paths import ROOT

from engram import EngramError, MemoryViT, load_trunk, random_trunk
from engram.cli import main as cli
from engram.images.preprocessing import Preprocessing
from engram.store.engram import Engram, TrunkInfo, dtype_of
from engram.store.format import (
    HEADER,
    parse_engram,
    read_engram,
    serialise_engram,
    write_engram,
)
from engram.tasks.regimes import REGIMES
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec
from engram.util.schema import Object
from engram.vit import ViT, ViTConfig

# Writing


def test_outside_tools_can_rely_on_names_and_shapes(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        found = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
        assert {str(file.get_tensor(name).dtype) for name in found} == {"torch.float32"}
        metadata = file.metadata()
    assert found == {
        "cells": (2, 3, 16),  # layers, cells, width
        "class_token": (1, 16),
        "head.weight": (3, 16),
        "head.bias": (3,),
    }
    header = json.loads(metadata["engram"])
    assert metadata["sha256"] == hashlib.sha256(metadata["engram"].encode()).hexdigest()
    assert header.keys() == {
        *("format", "task", "parents", "trunk", "preprocessing"),
        *("metrics", "recipe", "created", "library", "content"),
    }
    assert header["task"]["classes"] == ["rose", "tulip", "é"]
    assert header["metrics"] == {"accuracy": 0.5}


def test_the_same_engram_is_the_same_bytes(path: Path) -> None:
    """So that a hash of the file, as a dry run of a push shows it, can be relied on."""
    engram = read_engram(path)
    assert {serialise_engram(engram) for _ in range(8)} == {path.read_bytes()}


TINY = TrunkInfo(
    image_size=(16, 16), patch=8, width=4, depth=2, mlp_width=8, activation="gelu",
    class_token=True, prefix=1, parameters=1000, heads=2, source="vit", fingerprint="0" * 64,
    antialias=True,
)  # fmt: skip
#: Settings of tasks of every kind and regime that there was before side patches.
EARLIER: list[dict[str, Any]] = [
    *({"regime": name} for name in ("masked", "masked+adapter", "memory", "class", "head")),
    *({"regime": name} for name in ("mlp-head", "full", "adapter", "memory+adapter")),
    *({"kind": name} for name in ("multilabel", "regression")),
    {"kind": "segmentation", "tokens": 2, "values": (0, 1)},
    {"extends": ("a",)},
    {"regime": "memory", "update": "add"},
]


#: Those of side patches, as version 0.1.0 had them.
EARLIER_SIDE: list[dict[str, Any]] = [
    {"regime": "side"},
    {"regime": "side+readout", "layers": 3},
    {"regime": "side", "extends": ("a",)},
    {"regime": "side", "kind": "segmentation", "values": (0, 1)},
]


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [
        (EARLIER, "1605b4751dba99d0"),
        ([{"rank": 2, "side_form": 1, **one} for one in EARLIER_SIDE], "a3320aba7316d2a2"),
    ],
    ids=["before side patches", "side patches of form 1"],
)
def test_the_contents_of_earlier_engrams_do_not_change(
    earlier: list[dict[str, Any]], expected: str
) -> None:
    """Children and lists know an engram by its content, so a new setting must not be in it."""
    contents = hashlib.sha256()
    for settings in earlier:
        spec = TaskSpec("flowers", ("rose", "tulip"), cells=1, **settings)
        shapes = sorted(spec.shapes(TINY).items())
        tensors = {name: torch.full(shape, i / 8) for i, (name, shape) in enumerate(shapes)}
        parents = dict.fromkeys(spec.extends, "1" * 64)
        engram = Engram(spec, tensors, TINY, Preprocessing((16, 16), None), parents)
        contents.update(engram.content.encode())
    assert contents.hexdigest()[:16] == expected


def test_side_patches_of_the_first_form_answer_as_the_version_that_wrote_them() -> None:
    """The file and its logits come from version 0.1.0."""
    model = MemoryViT(load_trunk("pico"))
    task = model.attach(ROOT / "tests" / "support" / "side_form_1.safetensors")
    assert task.spec.side_form == 1
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(3, 32, 32).sin()
    with torch.no_grad():
        logits = model.eval()(torch.stack([image, image.flip(2)]))["side"]
    expected = [[6.530885, 20.975262, -14.554556], [6.516774, 20.922831, -14.585424]]
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert model.engram("side").header()["format"] == 1


def test_files_with_side_patches_of_a_newer_form_have_a_format_that_old_versions_refuse() -> None:
    model = MemoryViT(small_trunk())
    model.add_task("t", 3, regime="side")
    header = model.engram("t").header()
    assert (header["format"], header["task"]["side_form"]) == (2, 2)


def test_the_bytes_of_the_format_do_not_change() -> None:
    """A file that was written once can be compared with one that is written later."""
    spec = TaskSpec("flowers", ("rose", "tulip"), cells=1)
    shapes = {"head.weight": (2, 4), "head.bias": (2,), "class_token": (1, 4), "cells": (2, 1, 4)}
    tensors = {name: torch.full(shape, i / 8) for i, (name, shape) in enumerate(shapes.items())}
    engram = Engram(
        spec, tensors, TINY, Preprocessing((16, 16), None), {},
        metrics={"test": {"accuracy": 0.5}}, recipe={"lr": 0.01},
        created="2025-01-01T00:00:00+00:00", library="engram-vit 0.1.0",
    )  # fmt: skip
    assert engram.content[:16] == "52c0bb11b2f80a9c"
    data = serialise_engram(engram)
    assert len(data) == 1448
    assert hashlib.sha256(data).hexdigest()[:16] == "dcab06e4161eedcf"


@pytest.mark.parametrize("regime", REGIMES)
def test_only_headers_of_side_patches_and_readouts_speak_of_rank_and_layers(regime: str) -> None:
    model = MemoryViT(small_trunk())
    model.add_task("t", 3, regime=regime)
    header = model.engram("t").header()["task"]
    assert ("rank" in header) == REGIMES[regime].side
    assert ("layers" in header) == REGIMES[regime].moments


@pytest.mark.parametrize(
    ("regime", "changes", "reason"),
    [
        ("side", {"rank": 10_000}, "the tensor cells has the shape (3, 5, 4), but the header req"),
        ("side", {"rank": 10_001}, "task.rank"),
        ("side", {"rank": 0}, "task.rank"),
        ("side", {"rank": 4.0}, "task.rank"),
        (
            "side",
            {"rank": None},
            "task.rank is missing from the fields of classification with side",
        ),
        ("side", {"cells": 10_000}, "the tensor cells has the shape (3, 5, 4)"),
        ("side", {"layers": 3}, "task.layers is not a field of classification with side"),
        ("side", {"kind": "segmentation"}, "3 classes need as many values in the masks"),
        ("side", {"regime": "side+readout"}, "task.layers is missing"),
        ("side", {"side_form": 1}, "task.side_form"),
        ("side", {"side_form": 3}, "its side patches have the form 3; known are 1 and 2"),
        ("side", {"squares": True}, "task.squares is not a field of classification with side"),
        ("readout", {"squares": True, "layers": 1}, "task.squares belong to a readout of all"),
        ("readout", {"squares": True}, "the tensor head.weight has the shape"),
        ("readout", {"squares": False}, "task.squares is not a field of classification"),
        ("side", {"regime": "masked"}, "task.rank is not a field of classification with masked"),
        ("side", {"update": "add"}, "update='add' is for the regimes memory"),
        ("readout", {"layers": 10_000}, "task.layers is 10000, and the trunk has 3 to read"),
        ("readout", {"layers": 2}, "the tensor head.weight has the shape (3, 144), but the header"),
        ("readout", {"layers": 0}, "task.layers"),
        ("readout", {"rank": 16}, "task.rank is not a field of classification with readout"),
        ("side+readout", {"rank": 10_000, "layers": 1}, "the tensor cells has the shape"),
        ("masked", {"rank": 16}, "task.rank is not a field of classification with masked"),
        ("masked", {"values": [0, 1, 2]}, "values"),
    ],
)
def test_a_header_that_does_not_describe_its_tensors_is_refused_at_once(
    regime: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Before anything of that size is allocated: maps of rank 10,000 would take gigabytes."""
    model = MemoryViT(small_trunk())
    model.add_task("t", 3, regime=regime, rank=4)
    path = model.save("t", tmp_path / "t.safetensors")
    outer, body = split(path.read_bytes())
    header = json.loads(outer["__metadata__"]["engram"])
    header["task"] |= changes
    for name in [name for name, value in changes.items() if value is None]:
        del header["task"][name]
    path.write_bytes(joined(sealed(outer, header), body))
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refuses(reason):
        read_engram(path)
    assert time.monotonic() - started < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB
    assert cli.main(["inspect", str(path)]) == 2


def test_five_cells_and_ten_classes_for_b32_are_under_250_kb(tmp_path: Path) -> None:
    config = ViTConfig((224, 224), patch=32, width=768, depth=12, heads=12, mlp_width=3072)
    info = TrunkInfo(
        **vars(TrunkShape.of(config)), heads=12, source="b32", fingerprint="0" * 64, antialias=True
    )
    spec = TaskSpec("t", tuple(f"class {i}" for i in range(10)))
    shapes = spec.shapes(info)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    saved = write_engram(
        tmp_path / "t.safetensors", Engram(spec, tensors, info, Preprocessing(), {})
    )
    assert saved.stat().st_size < 250_000
    assert read_engram(saved).parameters == 46_848 + 7_690


# Statistics of the training images


def saved_with_statistics(folder: Path, **settings: Any) -> tuple[Path, MemoryViT]:
    model = MemoryViT(small_trunk())
    familiar(randomised(model.add_task("t", 3, **settings)))
    return model.save("t", folder / "t.safetensors"), model


@pytest.mark.parametrize(
    "settings", [{}, {"regime": "readout"}, {"kind": "multilabel"}, {"regime": "full"}], ids=str
)
def test_statistics_are_read_as_they_were_written(settings: dict[str, Any], tmp_path: Path) -> None:
    path, model = saved_with_statistics(tmp_path, **settings)
    other = MemoryViT(model.trunk)
    other.attach(path)
    pixels = torch.rand(2, 3, 16, 16)
    ours, theirs = (one.eval().scored(pixels)[1]["t"] for one in (model, other))
    assert torch.equal(ours, theirs)
    assert other.engram("t").content == read_engram(path).content == model.engram("t").content
    assert read_engram(path).header()["format"] == 2
    assert read_engram(path).parameters == sum(p.numel() for p in model.task("t").parameters())
    assert {str(t.dtype) for n, t in read_engram(path).tensors.items() if "means" in n} == {
        "torch.float16"
    }


def test_statistics_for_b32_take_less_than_50_kb() -> None:
    spec = TaskSpec("t", tuple(f"class {i}" for i in range(10)))
    config = ViTConfig((224, 224), patch=32, width=768, depth=12, heads=12, mlp_width=3072)
    shapes = spec.statistics(TrunkShape.of(config))
    sizes = [math.prod(shape) * dtype_of(name).itemsize for name, shape in shapes.items()]
    assert sum(sizes) < 50_000


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("deviation", torch.zeros(16), "the tensor statistics.deviation has values"),
        ("counts", torch.zeros(3), "the tensor statistics.counts has values"),
        ("quantiles", torch.tensor([0.0, -1.0]), "the tensor statistics.quantiles has values"),
        ("means", torch.zeros(4, 16).half(), "the tensor statistics.means has the shape (4, 16)"),
        ("means", torch.zeros(3, 16), "the tensor statistics.means is torch.float32"),
        ("basis", None, "the tensor statistics.basis has the shape none"),
        ("more", torch.zeros(1), "the tensor statistics.more has the shape (1,)"),
    ],
)
def test_statistics_that_no_images_have_are_refused(
    name: str, value: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    engram = read_engram(saved_with_statistics(tmp_path)[0])
    tensors = {**engram.tensors, f"statistics.{name}": value}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    bad = serialise_engram(replace(engram, tensors=tensors))
    with refuses(reason):
        parse_engram(bad, "t.safetensors")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_not_saved(value: float, trunk: ViT, path: Path) -> None:
    before = path.read_bytes()
    model = MemoryViT(trunk)
    task = model.attach(path)
    with torch.no_grad():
        task.head.weight[1, 2] = value
    with pytest.raises(EngramError, match=r"not finite in head\.weight"):
        model.save("a", path)
    assert path.read_bytes() == before


def test_a_killed_process_that_saves_leaves_a_whole_file(path: Path) -> None:
    before, first = read_engram(path), path.stat().st_ino
    child = os.fork()
    if child == 0:
        while True:
            write_engram(path, before)
    while path.stat().st_ino == first:  # until it has saved at least once
        time.sleep(0.001)
    time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert read_engram(path).content == before.content
    assert len([name for name in os.listdir(path.parent) if name.endswith(".tmp")]) <= 1


def test_every_field_of_an_engram_is_in_the_schema_of_the_header() -> None:
    task, trunk = HEADER.required["task"], HEADER.required["trunk"]
    assert isinstance(task, Object)
    assert isinstance(trunk, Object)
    assert {*task.required, *task.optional} == {field.name for field in fields(TaskSpec)}
    assert {*trunk.required, *trunk.optional} == {field.name for field in fields(TrunkInfo)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metrics": {"x": 10**400}}, "it must be one that 64 bits can hold"),
        ({"metrics": {"x": list(range(100_001))}}, "metrics has more than 100,000 values"),
        ({"recipe": {"x": "y" * 16_000_000}}, "its header is larger than 16 MB"),
        ({"recipe": {"x": "," * 1_000_001}}, "it has more than 1,000,000 values"),
        ({"preprocessing": Preprocessing((12, 16), None)}, "multiples of the trunk's patch size 8"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(
    change: dict[str, Any], reason: str, path: Path
) -> None:
    with pytest.raises(EngramError, match=f"'a' cannot be saved: .*{reason}.* Nothing was written"):
        serialise_engram(replace(read_engram(path), **change))


def test_a_long_list_of_unreadable_images_is_saved_as_its_length(trunk: ViT, path: Path) -> None:
    model = MemoryViT(trunk)
    model.attach(path)
    names = [f"{i}.png" for i in range(1001)]
    metrics = {"test": {"unreadable": names, "some": names[:3]}}
    saved = model.save("a", path, metrics=metrics)
    assert read_engram(saved).metrics == {"test": {"unreadable": 1001, "some": names[:3]}}


# 1,000 damaged engrams


def test_there_are_a_thousand() -> None:
    assert sum(DAMAGE.values()) >= 1000


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_engram_is_refused_or_unchanged(
    damage: Callable[[bytes, Random], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = Originals(tmp_path)
    damaged = tmp_path / "damaged.safetensors"
    random = Random(damage.__name__)
    refused = 0
    for _ in range(DAMAGE[damage]):
        which = random.randrange(len(originals.paths))
        good = originals.engrams[which]
        damaged.write_bytes(damage(originals.paths[which].read_bytes(), random))
        started = time.monotonic()
        try:
            engram, task = originals.attach(which, damaged)
        except EngramError as error:
            refused += 1
            sentence = str(error)
            assert sentence.endswith(".")
            assert sentence.isprintable()  # so it is one line
            assert len(sentence) < 1000
            expected = 2
        else:
            assert engram.tensors.keys() == good.tensors.keys() == task.tensors().keys()
            for name, tensor in good.tensors.items():
                assert torch.equal(engram.tensors[name], tensor)
                assert torch.equal(task.tensors()[name], tensor)
            if damage is not other_header:  # which also makes other engrams, with right hashes
                assert engram.content == good.content
            expected = 0
        assert time.monotonic() - started < 5
        code = cli.main(["inspect", str(damaged)])
        assert code in {
            0,
            expected,
        }  # one that is good but does not fit this trunk is described, too
        assert "Traceback" not in capsys.readouterr().err
    assert refused > DAMAGE[damage] * 0.6


@pytest.mark.parametrize("damage", [flipped, huge, odd_json], ids=lambda damage: damage.__name__)
def test_a_damaged_engram_in_a_real_process(
    damage: Callable[[bytes, Random], bytes], path: Path, nursery: Any
) -> None:
    random = Random(1)
    good = path.read_bytes()
    while True:
        path.write_bytes(damage(good, random))
        try:
            read_engram(path)
        except EngramError:
            break
    done = nursery.run("inspect", path)
    assert done.code == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ("{" + ",".join(f'"{i}":1' for i in range(2_600_000)) + "}", "larger than 16 MB"),
        ('{"x":[' + "[]," * 3_000_000 + "[]]}", "more than 1,000,000 values"),
        ('{"x":[' + "[]," * 400_000 + "[]]}", "metrics has more than 100,000 values"),
        ('{"x":' + '{"x":' * 500 + "1" + "}" * 501, "nested more than 100 levels deep"),
    ],
    ids=["33 MB", "9 MB of lists", "lists", "nested"],
)
def test_a_header_that_expands_too_far_is_refused_at_once(
    metrics: str, reason: str, path: Path
) -> None:
    outer, body = split(path.read_bytes())
    header = {**json.loads(outer["__metadata__"]["engram"]), "metrics": "HERE"}
    text = json.dumps(header).replace('"HERE"', metrics)
    path.write_bytes(joined(sealed(outer, text), body))
    del metrics, text, outer
    started = time.monotonic()
    with pytest.raises(EngramError, match=reason):
        read_engram(path)
    assert time.monotonic() - started < 1
    assert cli.main(["inspect", str(path)]) == 2


def test_100000_classes_with_long_names_fit_into_a_header(tmp_path: Path) -> None:
    model = MemoryViT(random_trunk(image_size=8, patch=8, width=2, depth=1, heads=1))
    taxon = "Plantae_Tracheophyta_Magnoliopsida_Lamiales_Orobanchaceae"
    names = [f"{i:05}_{taxon}" for i in range(100_000)]
    model.add_task("species", names, 1)
    saved = model.save("species", tmp_path / "species.safetensors")
    started = time.monotonic()
    assert read_engram(saved).spec.classes == tuple(names)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("field", ["metrics", "recipe", "trunk", "task"])
def test_a_header_that_utf8_cannot_hold_is_damaged(field: str, path: Path) -> None:
    outer, body = split(path.read_bytes())
    header = json.loads(outer["__metadata__"]["engram"])
    other = {"trunk": {"source": "\udce9"}, "task": {"classes": ["a", "b", "\udce9"]}}
    header[field] |= other.get(field, {"x": ["\udce9"]})
    header = with_content(header, path.read_bytes())
    path.write_bytes(joined(sealed(outer, header), body))
    with pytest.raises(EngramError, match="damaged: its header holds text that UTF-8 cannot"):
        read_engram(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source, expected in (
        (tmp_path, "is not a file"),
        (tmp_path / "pipe", "is not a file"),
        (tmp_path / "none", "No such file"),
        (Path("/dev/zero"), "is not a file"),
        (Path("\0"), "cannot be read"),
    ):
        with pytest.raises(EngramError, match=expected):
            read_engram(source)
