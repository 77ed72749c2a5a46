"""Numbers in a stranger's file are a sentence or work: no traceback, no NaN, no endless work."""

import copy
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tests.support.backbones import VIT, timm_names
from tests.support.commands import Output, run
from tests.support.damage import joined, sealed, split, spots, with_content
from tests.support.regimes import known
from tests.support.waiting import computing_less_than

from engram import EngramError, MemoryViT, ViT, load_backbone, predict, random_backbone
from engram.store.describe import describe_backbone, describe_engram
from engram.store.engram import Engram
from engram.store.format import parse_engram
from engram.util.documents import jsonable

HUGE = 10**400  # no float holds it
TINY = 5e-324  # no single-precision float holds it


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, small_backbone: Path) -> Path:
    """A backbone of 16 pixels with patches of 4, engrams for it and a picture."""
    folder = tmp_path_factory.mktemp("good")
    shutil.copytree(small_backbone, folder / "vit")
    Image.new("RGB", (20, 16), (210, 50, 60)).save(folder / "red.png")
    model = MemoryViT(load_backbone(folder / "vit"))
    model.backbone.source = "vit"
    for name, regime in (("a", "masked"), ("side", "side"), ("readout", "readout")):
        settings = known(regime, cells=2, rank=4)
        model.add_task(name, ["red", "blue"], regime=regime, seed=0, **settings)
        path = folder / f"{name}.safetensors"
        model.save(name, path, metrics={"accuracy": 0.5}, recipe={"lr": 0.1})
    return folder


@pytest.fixture
def work(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these files that a test may damage."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(good, tmp_path, dirs_exist_ok=True))


def put(document: Any, where: str, value: Any) -> None:
    """Set the value at a place such as `backbone.image_size`."""
    *way, last = where.split(".")
    for key in way:
        document = document[key]
    document[last] = value


def with_header(where: str, value: Any) -> None:
    """Another value in the header, with the hashes that belong to it."""
    data = Path("a.safetensors").read_bytes()
    outer, body = split(data)
    header = json.loads(outer["__metadata__"]["engram"])
    put(header, where, value)
    header = with_content(header, data)
    Path("a.safetensors").write_bytes(joined(sealed(outer, header), body))


def assert_refused(capsys: Output, *arguments: object) -> str:
    """Exit code 2 within two seconds, one line for people, one JSON document for machines."""
    with computing_less_than(2):
        assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert len(err) < 1000
    assert "Something went wrong" not in err
    assert run(*arguments, "--json") == 2
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said == {"error": err.strip()}
    return err


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *(("preprocessing.mean", [value] * 3) for value in (HUGE, -HUGE, 1e39, 1e308)),
        *(("preprocessing.std", [value] * 3) for value in (HUGE, TINY, 1e-45, 1e39, 0, -1)),
        *(("preprocessing.size", [value] * 2) for value in (HUGE, 10**9, 2048, 368, 18, 0, 16.0)),
        *(("preprocessing.resize", value) for value in (HUGE, 10**9, 1e9, 8)),
        *(("preprocessing.mean", value) for value in ([], [0.5], [0.5] * 4, [True] * 3, None, 0.5)),
        *(("backbone.image_size", value) for value in ([], [16], [1e9] * 2, [HUGE] * 2, 16, None)),
        *(("backbone.image_size", value) for value in ([10**6] * 2, [0, 16], [3, 3], [368, 368])),
        *((f"backbone.{name}", value) for name in ("patch", "width", "depth", "heads", "mlp_width")
          for value in (HUGE, 10**11, 0, -1, 2.0, True, None)),
        *((f"backbone.{name}", HUGE) for name in ("prefix", "parameters")),
        *((f"task.{name}", HUGE) for name in ("cells", "tokens", "adapter_width")),
        *((f"{name}.x", value) for name in ("metrics", "recipe")
          for value in (HUGE, float("nan"), float("inf"), [[float("nan")]])),
        ("format", HUGE),
    ],
    ids=lambda item: str(item)[:30],
)  # fmt: skip
def test_an_odd_number_in_a_header_is_refused(
    where: str, value: Any, work: Path, capsys: Output
) -> None:
    with_header(where, value)
    assert_refused(capsys, "inspect", "a.safetensors")
    assert_refused(capsys, "predict", "a.safetensors", "red.png", "--backbone", "vit")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("preprocessing.mean", [1e4, -1e4, 0]),
        ("preprocessing.std", [1e-4, 1e4, 1]),
        ("preprocessing.size", [128, 128]),  # 1,024 patches of a backbone that learned from 16
        ("preprocessing.size", [4, 4]),
        ("metrics.x", 2**64 - 1),
    ],
)
def test_an_unusual_number_in_a_header_works(
    where: str, value: Any, work: Path, capsys: Output
) -> None:
    if where == "preprocessing.size":
        with_header("preprocessing.resize", None)
    with_header(where, value)
    assert run("inspect", "a.safetensors") == 0
    assert run("predict", "a.safetensors", "red.png", "--backbone", "vit") == 0
    assert "nan" not in capsys.readouterr().out
    assert run("predict", "a.safetensors", "red.png", "--backbone", "vit", "--json") == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *(("config.image_size", value) for value in ([], [16], [1e9] * 2, [HUGE] * 2, None)),
        *(("config.image_size", value) for value in ([10**9] * 2, [-16, -16], [3, 3], "1616")),
        *((f"config.{name}", value) for name in ("patch", "width", "depth", "heads", "mlp_width")
          for value in (HUGE, 10**11, 0, -1, 2.0, True, None, [])),
        *(("config.registers", value) for value in (HUGE, -1, 10**9, "1")),
        *(("config.prefix_positions", value) for value in (HUGE, -1, 10**9)),
        *(("config.eps", value) for value in (HUGE, 0, -1, float("nan"), float("inf"), TINY, "x")),
        *(("config.head.classes", value) for value in (HUGE, -1, 10**12, 1.5)),
        *(("config.class_token", value) for value in (HUGE, None, 3)),
        *(("preprocessing.mean", [value] * 3) for value in (HUGE, 1e39, float("nan"))),
        *(("preprocessing.std", [value] * 3) for value in (HUGE, TINY, 0)),
        *(("preprocessing.size", value) for value in ([], [HUGE] * 2, [2048] * 2, [1e9] * 2)),
        *(("preprocessing.resize", value) for value in (HUGE, 1e9)),
        ("engram_backbone", HUGE),
    ],
    ids=lambda item: str(item)[:30],
)  # fmt: skip
def test_an_odd_number_in_the_configuration_of_a_backbone_is_refused(
    where: str, value: Any, work: Path, capsys: Output
) -> None:
    config = json.loads(Path("vit/config.json").read_text())
    put(config, where, value)
    Path("vit/config.json").write_text(json.dumps(config))
    assert "vit" in assert_refused(capsys, "inspect", "vit")


# Any value in any place

ODD = [
    *(HUGE, -HUGE, 0, -1, 1, 2, 3, 4, 7, 8, 16, 128, 255, 10**9, 2**31, 2**63, 2**64, 1e9, 0.5),
    *(1e39, 1e308, TINY, 1e-45, float("nan"), float("inf"), -float("inf"), True, False, None),
    *(
        "",
        "x",
        "16",
        [],
        {},
        [1],
        [16, 16],
        [8, 24],
        [1e9] * 2,
        [10**9] * 2,
        [HUGE] * 2,
        [None] * 2,
    ),
    *([[16, 16]] * 2, [0.5] * 3, [0] * 3, [HUGE] * 3, [TINY] * 3, [3, 16, 16], [3, 10**9, 16]),
    *({"height": 16, "width": 16}, {"shortest_edge": 10**9}, {"height": HUGE, "width": 16}),
    *({"a": [{"b": 1}]}, "\x1b[2J\u202e", "0" * 64, ["x"] * 3, [True] * 3),
]


def changed(document: Any, random: Random) -> Any:
    """The document with odd values in one to three places, or without some of its fields."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 2, 3))):
        *way, last = random.choice(list(spots(document)))
        place = document
        for key in way:
            place = place[key]
        if random.random() < 0.1:
            del place[last]
        else:
            place[last] = copy.deepcopy(random.choice(ODD))
    return document


def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or None after an EngramError. Any other error, or two seconds, fails."""
    result = None
    with computing_less_than(2), suppress(EngramError):
        result = work(*arguments)
    return result


@pytest.fixture
def little_memory() -> Iterator[None]:
    """The test takes no more than 300 MB beyond what its process has had already."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


def answers(engram: Engram, backbone: ViT) -> dict[str, Any]:
    backbone.preprocessing = engram.preprocessing
    model = MemoryViT(backbone)
    model.attach(engram)
    (found,) = predict(model, ["red.png"])
    return found


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("name", "times"), [("a", 1000), ("side", 400), ("readout", 400)])
def test_any_value_in_a_header_is_refused_or_works(work: Path, name: str, times: int) -> None:
    backbone, random = load_backbone("vit"), Random("headers")
    data = Path(f"{name}.safetensors").read_bytes()
    outer, body = split(data)
    header = json.loads(outer["__metadata__"]["engram"])
    read = attached = 0
    for _ in range(times):
        text = joined(sealed(outer, with_content(changed(header, random), data)), body)
        engram = attempt(parse_engram, text, "x.safetensors")
        if engram is not None:
            read += 1
            json.dumps(describe_engram(engram).document, allow_nan=False)
            found = attempt(answers, engram, backbone)
            if found is not None:
                attached += 1
                assert set(found["tasks"]) == {engram.spec.name}
                json.dumps(found, allow_nan=False)
    assert times / 30 < read < times * 2 / 3
    assert attached > times / 150


def configurations(folder: Path) -> dict[str, tuple[str, ...]]:
    """A backbone in the layout of every library: its folder, and the files of its configuration."""
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, num_labels=3))
    model.save_pretrained(folder / "transformers")
    processor = {
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_center_crop": True,
        "size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}, "resample": 3,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (folder / "transformers" / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "timm").mkdir()
    save_file(timm_names(random_backbone()), folder / "timm" / "model.safetensors")
    cfg = {
        "input_size": [3, 32, 32], "crop_pct": 0.9, "crop_mode": "center", "tag": "x",
        "interpolation": "bicubic", "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    arguments = {"num_heads": 4, "act_layer": "gelu", "global_pool": "token"}
    config = {"architecture": "vit_x", "pretrained_cfg": cfg, "model_args": arguments}
    (folder / "timm" / "config.json").write_text(
        json.dumps({**config, "num_classes": 10, "label_names": list("abcdefghij")})
    )
    return {
        "vit": ("config.json",),
        "transformers": ("config.json", "preprocessor_config.json"),
        "timm": ("config.json",),
    }


@pytest.mark.usefixtures("little_memory")
def test_any_value_in_the_configuration_of_a_backbone_is_refused_or_works(work: Path) -> None:
    random = Random("configurations")
    for name, files in configurations(work).items():
        loaded = refused = 0
        for file in files:
            path = work / name / file
            good = path.read_text()
            for _ in range(60):
                path.write_text(json.dumps(changed(json.loads(good), random)))
                backbone = attempt(load_backbone, name)
                loaded, refused = loaded + (backbone is not None), refused + (backbone is None)
                if backbone is not None:
                    check_usable(backbone)
            path.write_text(good)
        assert min(loaded, refused) > 1, (name, loaded, refused)


def check_usable(backbone: ViT) -> None:
    """A backbone that was loaded can be described and takes its images."""
    json.dumps(jsonable(describe_backbone(backbone).document), allow_nan=False)
    model = MemoryViT(backbone)
    model.add_task("t", 2, 1)
    assert attempt(predict, model, ["red.png"])


def test_an_answer_that_is_not_finite_is_an_error_and_the_others_stay(
    work: Path, capsys: Output
) -> None:
    model = MemoryViT(load_backbone("vit"))
    model.add_task("good", ["red", "blue"], 2, seed=0)
    bad = model.add_task("bad", ["red", "blue"], 2, seed=0)
    with torch.no_grad():
        bad.head.weight.fill_(3e38)  # finite, but sums of it are not
        bad.class_token.fill_(1e3)
    for name in ("good", "bad"):
        model.save(name, f"{name}.safetensors")
    command = ("predict", "good.safetensors", "bad.safetensors", "red.png", "--backbone", "vit")
    assert run(*command) == 2
    out = capsys.readouterr().out
    assert "nan" not in out
    assert "'bad' is not finite" in out
    assert run(*command, "--json") == 2
    (said,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert set(said["tasks"]) == {"good"}
    assert "'bad' is not finite" in said["error"]
