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
from tests.support.engrams import familiar, randomised, small_backbone
from tests.support.errors import refuses
from tests.support.regimes import SUPERVISED, class_count, known
from tests.support.waiting import computing_less_than

from engram import EngramError, MemoryViT, random_backbone
from engram.backbones.shape import BackboneShape
from engram.cli import main as cli
from engram.images.preprocessing import Preprocessing
from engram.methods import METHODS, Masked, create_method
from engram.store.engram import BackboneInfo, Engram, stored_dtype
from engram.store.format import (
    HEADER,
    parse_engram,
    read_engram,
    serialise_engram,
    write_engram,
)
from engram.tasks.spec import TaskSpec
from engram.util.schema import Object
from engram.vit.vit import ViT, ViTConfig

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
        *("format", "task", "parents", "backbone", "preprocessing"),
        *("metrics", "recipe", "created", "library", "content"),
    }
    assert header["task"]["classes"] == ["rose", "tulip", "é"]
    assert header["metrics"] == {"accuracy": 0.5}


def test_the_same_engram_is_the_same_bytes(path: Path) -> None:
    """So that a hash of the file, as a dry run of a push shows it, can be relied on."""
    engram = read_engram(path)
    assert {serialise_engram(engram) for _ in range(8)} == {path.read_bytes()}


TINY = BackboneInfo(
    image_size=(16, 16), patch=8, width=4, depth=2, mlp_width=8, activation="gelu",
    class_token=True, prefix=1, parameters=1000, heads=2, source="vit", fingerprint="0" * 64,
    antialias=True,
)  # fmt: skip
#: Settings of tasks of every kind and regime.
TASKS: list[dict[str, Any]] = [
    *({"regime": name} for name in SUPERVISED),
    *({"kind": name} for name in ("multilabel", "regression", "segmentation")),
    {"regime": "side", "kind": "segmentation"},
    {"extends": ("a",)},
    {"regime": "side", "extends": ("a",)},
    {"regime": "memory", "update": "add"},
    {"regime": "readout", "grid": True},
]


def tiny_spec(
    kind: str = "classification",
    regime: str = "masked",
    extends: tuple[str, ...] = (),
    **settings: Any,
) -> TaskSpec:
    method = create_method(regime, known(regime, cells=1, rank=2) | settings)
    spec = TaskSpec.create("flowers", ("rose", "tulip"), method, extends=extends, kind=kind)
    return spec.fitted(TINY)


def test_the_contents_of_engrams_do_not_change() -> None:
    """Children and lists know an engram by its content, so a new setting must not be in it."""
    contents = hashlib.sha256()
    for settings in TASKS:
        spec = tiny_spec(**settings)
        shapes = sorted(spec.shapes(TINY).items())
        tensors = {name: torch.full(shape, i / 8) for i, (name, shape) in enumerate(shapes)}
        parents = dict.fromkeys(spec.extends, "1" * 64)
        engram = Engram(spec, tensors, TINY, Preprocessing((16, 16), None), parents)
        contents.update(engram.content.encode())
    assert contents.hexdigest()[:16] == "d9a1e659fcf3635d"


def test_the_bytes_of_the_format_do_not_change() -> None:
    """A file that was written once can be compared with one that is written later."""
    spec = tiny_spec()
    shapes = {"head.weight": (2, 4), "head.bias": (2,), "class_token": (1, 4), "cells": (2, 1, 4)}
    tensors = {name: torch.full(shape, i / 8) for i, (name, shape) in enumerate(shapes.items())}
    engram = Engram(
        spec, tensors, TINY, Preprocessing((16, 16), None), {},
        metrics={"test": {"accuracy": 0.5}}, recipe={"lr": 0.01},
        created="2025-01-01T00:00:00+00:00", library="engram-vit 0.1.0",
    )  # fmt: skip
    assert engram.content[:16] == "d5c6c6b21a45e447"
    data = serialise_engram(engram)
    assert len(data) == 1400
    assert hashlib.sha256(data).hexdigest()[:16] == "83a1f9acb94b5192"


@pytest.mark.parametrize("regime", METHODS)
def test_a_header_has_the_settings_of_its_regime_and_no_others(regime: str) -> None:
    model = MemoryViT(small_backbone())
    kind = "anomaly" if METHODS[regime].one_class else "classification"
    task = model.add_task("t", class_count(kind), kind=kind, regime=regime)
    header = model.engram("t").header()["task"]
    own = header.keys() - {"name", "kind", "regime", "classes", "extends"}
    method = METHODS[regime]
    assert own == set(method.setting_names())
    assert {name: header[name] for name in own} == task.method.settings()


@pytest.mark.parametrize(
    ("regime", "changes", "reason"),
    [
        (
            "side",
            {"rank": 10_000},
            "the tensor cells has the shape (3, 5, 4), and (3, 5, 10000) is",
        ),
        ("side", {"rank": 10_001}, "rank is 10001"),
        ("side", {"rank": 0}, "rank is 0"),
        ("side", {"rank": 4.0}, "rank is 4.0"),
        ("side", {"rank": [4]}, "rank is a list"),
        ("side", {"rank": None}, "task.rank is missing"),
        ("side", {"cells": 10_000}, "the tensor cells has the shape (3, 5, 4)"),
        ("side", {"layers": 3}, "'side' has no setting 'layers'"),
        ("side", {"kind": "segmentation"}, "3 classes need as many values in the masks"),
        ("side", {"regime": "side+readout"}, "is missing"),
        ("side", {"regime": "none"}, "no regime 'none'"),
        ("side", {"grid": True}, "'side' has no setting 'grid'"),
        ("readout", {"grid": True, "layers": 1}, "a grid belongs to a head on all"),
        ("readout", {"grid": True}, "the tensor head.weight has the shape"),
        ("readout", {"grid": "yes"}, "grid is 'yes'"),
        ("side", {"regime": "masked"}, "'masked' has no setting 'rank'"),
        ("side", {"update": "add"}, "'side' has no setting 'update'"),
        ("readout", {"layers": 10_000}, "task.layers is 10000, and on this backbone it is 3"),
        ("readout", {"layers": 2}, "the tensor head.weight has the shape (3, 144), and (3, 96)"),
        ("readout", {"layers": 0}, "task.layers is 0"),
        ("readout", {"rank": 16}, "'readout' has no setting 'rank'"),
        ("side+readout", {"rank": 10_000, "layers": 1}, "the tensor cells has the shape"),
        ("masked", {"rank": 16}, "'masked' has no setting 'rank'"),
        ("masked", {"values": [0, 1, 2]}, "values"),
        ("masked", {"tokens": 2}, "the tensor class_token has the shape"),
        ("masked", {"tokens": 0}, "task.tokens is 0"),
    ],
)
def test_a_header_that_does_not_describe_its_tensors_is_refused_at_once(
    regime: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Before anything of that size is allocated: maps of rank 10,000 would take gigabytes."""
    model = MemoryViT(small_backbone())
    model.add_task("t", 3, regime=regime, **known(regime, rank=4))
    path = model.save("t", tmp_path / "t.safetensors")
    outer, body = split(path.read_bytes())
    header = json.loads(outer["__metadata__"]["engram"])
    header["task"] |= changes
    for name in [name for name, value in changes.items() if value is None]:
        del header["task"][name]
    path.write_bytes(joined(sealed(outer, header), body))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with computing_less_than(1), refuses(reason):
        read_engram(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB
    assert cli.main(["inspect", str(path)]) == 2


def test_five_cells_and_ten_classes_for_b32_are_under_250_kb(tmp_path: Path) -> None:
    config = ViTConfig((224, 224), patch=32, width=768, depth=12, heads=12, mlp_width=3072)
    info = BackboneInfo(
        **vars(BackboneShape.measure(config)),
        heads=12,
        source="b32",
        fingerprint="0" * 64,
        antialias=True,
    )
    spec = TaskSpec("t", tuple(f"class {i}" for i in range(10)), method=Masked(tokens=1))
    shapes = spec.shapes(info)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    saved = write_engram(
        tmp_path / "t.safetensors", Engram(spec, tensors, info, Preprocessing(), {})
    )
    assert saved.stat().st_size < 250_000
    assert read_engram(saved).parameters == 46_848 + 7_690


# Statistics of the training images


def saved_with_statistics(folder: Path, **settings: Any) -> tuple[Path, MemoryViT]:
    model = MemoryViT(small_backbone())
    familiar(randomised(model.add_task("t", 3, **settings)))
    return model.save("t", folder / "t.safetensors"), model


@pytest.mark.parametrize(
    "settings", [{}, {"regime": "readout"}, {"kind": "multilabel"}, {"regime": "full"}], ids=str
)
def test_statistics_are_read_as_they_were_written(settings: dict[str, Any], tmp_path: Path) -> None:
    path, model = saved_with_statistics(tmp_path, **settings)
    other = MemoryViT(model.backbone)
    other.attach(path)
    pixels = torch.rand(2, 3, 16, 16)
    ours, theirs = (one.eval().with_familiarity(pixels)[1]["t"] for one in (model, other))
    assert torch.equal(ours, theirs)
    assert other.engram("t").content == read_engram(path).content == model.engram("t").content
    assert read_engram(path).parameters == sum(p.numel() for p in model.task("t").parameters())
    assert {str(t.dtype) for n, t in read_engram(path).tensors.items() if "means" in n} == {
        "torch.float16"
    }


def test_statistics_for_b32_take_less_than_50_kb() -> None:
    spec = TaskSpec("t", tuple(f"class {i}" for i in range(10)), method=Masked(tokens=1))
    config = ViTConfig((224, 224), patch=32, width=768, depth=12, heads=12, mlp_width=3072)
    shapes = spec.statistics(BackboneShape.measure(config))
    sizes = [math.prod(shape) * stored_dtype(spec, name).itemsize for name, shape in shapes.items()]
    assert sum(sizes) < 50_000


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("deviation", torch.zeros(16), "statistics.deviation has values"),
        ("counts", torch.zeros(3), "statistics.counts has values"),
        ("quantiles", torch.tensor([0.0, -1.0]), "statistics.quantiles has values"),
        ("means", torch.zeros(4, 16).half(), "statistics.means has the shape (4, 16)"),
        ("means", torch.zeros(3, 16), "statistics.means is torch.float32"),
        ("basis", None, "statistics.basis has the shape"),
        ("more", torch.zeros(1), "statistics.more has the shape"),
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
def test_values_that_are_not_finite_are_not_saved(value: float, backbone: ViT, path: Path) -> None:
    before = path.read_bytes()
    model = MemoryViT(backbone)
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
    task, backbone = HEADER.required["task"], HEADER.required["backbone"]
    assert isinstance(task, Object)
    assert isinstance(backbone, Object)
    own = {field.name for field in fields(TaskSpec)} - {"method"}
    assert {*task.required, *task.optional} == own | {"regime"}  # settings are the method's
    assert {*backbone.required, *backbone.optional} == {
        field.name for field in fields(BackboneInfo)
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metrics": {"x": 10**400}}, "64 bits"),
        ({"metrics": {"x": list(range(100_001))}}, "metrics has more than 100,000 values"),
        ({"recipe": {"x": "y" * 16_000_000}}, "its header is larger than 16 MB"),
        ({"recipe": {"x": "," * 1_000_001}}, "it has more than 1,000,000 values"),
        (
            {"preprocessing": Preprocessing((12, 16), None)},
            "multiples of the backbone's patch size 8",
        ),
    ],
)
def test_what_could_not_be_read_again_is_not_written(
    change: dict[str, Any], reason: str, path: Path
) -> None:
    with pytest.raises(EngramError, match=f"'a' cannot be saved: .*{reason}.* Nothing was written"):
        serialise_engram(replace(read_engram(path), **change))


def test_a_long_list_of_unreadable_images_is_saved_as_its_length(backbone: ViT, path: Path) -> None:
    model = MemoryViT(backbone)
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
        began = time.process_time()
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
        assert time.process_time() - began < 5
        code = cli.main(["inspect", str(damaged)])
        assert code in {
            0,
            expected,
        }  # one that is good but does not fit this backbone is described, too
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
    with computing_less_than(1), pytest.raises(EngramError, match=reason):
        read_engram(path)
    assert cli.main(["inspect", str(path)]) == 2


def test_100000_classes_with_long_names_fit_into_a_header(tmp_path: Path) -> None:
    model = MemoryViT(random_backbone(image_size=8, patch=8, width=2, depth=1, heads=1))
    taxon = "Plantae_Tracheophyta_Magnoliopsida_Lamiales_Orobanchaceae"
    names = [f"{i:05}_{taxon}" for i in range(100_000)]
    model.add_task("species", names, 1)
    saved = model.save("species", tmp_path / "species.safetensors")
    with computing_less_than(2):
        assert read_engram(saved).spec.classes == tuple(names)


@pytest.mark.parametrize("field", ["metrics", "recipe", "backbone", "task"])
def test_a_header_that_utf8_cannot_hold_is_damaged(field: str, path: Path) -> None:
    outer, body = split(path.read_bytes())
    header = json.loads(outer["__metadata__"]["engram"])
    other = {"backbone": {"source": "\udce9"}, "task": {"classes": ["a", "b", "\udce9"]}}
    header[field] |= other.get(field, {"x": ["\udce9"]})
    header = with_content(header, path.read_bytes())
    path.write_bytes(joined(sealed(outer, header), body))
    with pytest.raises(EngramError, match="UTF-8"):
        read_engram(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source, expected in (
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "none", "No such file"),
        (Path("/dev/zero"), "not a regular file"),
        (Path("\0"), "cannot be read"),
    ):
        with pytest.raises(EngramError, match=expected):
            read_engram(source)
