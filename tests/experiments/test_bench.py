"""What is measured is the same work, compared fairly and told in full. No time is judged here."""

import json
import math

import pytest
import torch

from engram import MemoryViT, random_trunk
from engram.cli.main import main
from engram.errors import EngramError
from engram.experiments.bench import PLAIN, Size, bench, cached_step, shaped, steps
from engram.experiments.peers import Lora, Separate, Straightforward, VitPytorch, installed
from engram.experiments.timing import Case, compare, exponent, quartiles
from engram.tasks.costs import trunk_macs
from engram.tasks.shape import TrunkShape
from engram.vit import ViT


@pytest.fixture
def trunk() -> ViT:
    return random_trunk(image_size=16, width=16, depth=2, heads=2)


def with_values(model: MemoryViT) -> MemoryViT:
    """Heads start at zero: give them something to say."""
    for task in model.tasks.values():
        torch.nn.init.normal_(task.head.weight)
        torch.nn.init.normal_(task.head.bias)
    return model.eval()


# The straightforward implementation is a peer: it must compute the same thing


@pytest.mark.parametrize(
    "options", [{}, {"layer_scale": True, "qkv_bias": False}, {"registers": 2}]
)
def test_the_straightforward_way_gives_the_same_logits(options: dict[str, object]) -> None:
    trunk = random_trunk(image_size=16, width=16, depth=3, heads=2, **options)
    model = MemoryViT(trunk)
    for i, cells in enumerate((5, 0, 2)):
        model.add_task(f"task{i}", classes=3 + i, cells=cells)
    model = with_values(model)
    pixels = torch.randn(3, 3, 16, 16)
    with torch.inference_mode():
        wanted, found = model(pixels), Straightforward(model)(pixels)
    assert wanted.keys() == found.keys() == {"base", "task0", "task1", "task2"}
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-5, rtol=1e-4)


def test_the_straightforward_way_gives_the_same_gradients(trunk: ViT) -> None:
    model = MemoryViT(trunk)
    task = model.add_task("task0", classes=3, cells=2)
    with_values(model)
    pixels = torch.randn(2, 3, 16, 16)
    found = []
    for answer in (model, Straightforward(model)):
        model.zero_grad()
        answer(pixels)["task0"].square().sum().backward()
        found.append([p.grad.clone() for p in task.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) == 4
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_the_straightforward_way_refuses_what_it_cannot_do(trunk: ViT) -> None:
    model = MemoryViT(trunk)
    model.add_task("a", 2)
    model.add_task("b", 2, extends=["a"])
    with pytest.raises(EngramError, match="no parents"):
        Straightforward(model)


# The other libraries


@pytest.mark.parametrize("name", ["separate", "vit-pytorch", "lora"])
def test_peers_answer_one_task_a_pass_and_train_it(trunk: ViT, name: str) -> None:
    if name != "separate" and name not in installed(trunk):
        pytest.skip(f"{name} is not installed")
    peer = {
        "separate": lambda: Separate(trunk, 2, 3),
        "vit-pytorch": lambda: VitPytorch(trunk, 2, 3, 5),
        "lora": lambda: Lora(trunk, 2, 3),
    }[name]()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        first, second, again = (peer.one_pass(pixels) for _ in range(3))
    assert first.shape == (2, 3)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)  # two tasks, in turn
    trained = list(peer.trained())
    counts = {
        "separate": sum(p.numel() for n, p in trunk.named_parameters() if n[:5] != "head.") + 51,
        "vit-pytorch": 2 * 5 * 16 + 16 + 32 + 51,  # cells, class token, norm, head
        "lora": 2 * 2 * (16 * 8 + 8 * 16) + 51,  # layers, q and v, down and up; head
    }
    assert sum(p.numel() for p in trained) == counts[name]


def test_shapes_that_other_libraries_lack_are_measured_without_them() -> None:
    assert installed(random_trunk(registers=2)) == []
    assert installed(random_trunk(class_token=False, prefix_positions=0)) == []


# Timing


def test_an_exponent_is_found_again() -> None:
    xs = [1, 2, 5, 10, 50, 200]
    assert exponent(xs, [3 * x**1.7 for x in xs]) == pytest.approx(1.7)
    assert exponent(xs, [4.0] * len(xs)) == pytest.approx(0)
    noisy = [x**2 * math.exp(0.01 * (-1) ** i) for i, x in enumerate(xs)]
    assert exponent(xs, noisy) == pytest.approx(2, abs=0.02)


def test_cases_take_turns_and_are_scaled() -> None:
    order: list[str] = []
    cases = {
        "a": Case(lambda: order.append("a")),
        "b": Case(lambda: order.append("b"), runs=2, of=10),
    }
    said: list[str] = []
    found = compare(cases, seconds=0, least=2, say=said.append)
    assert order == ["a", "b", *["a", "b", "b"] * 2]
    assert cases["b"].scale == 5
    assert found["a"].ratio == found["a"].low == found["a"].high == 1
    assert found["b"].rounds == len(said) == 2
    assert found["b"].low <= found["b"].ratio <= found["b"].high


def test_rounds_end_at_the_most() -> None:
    assert compare({"a": Case(lambda: None)}, seconds=60, most=4)["a"].rounds == 4


def test_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


# Steps and the whole


def test_every_step_updates_and_the_frozen_trunk_stays(trunk: ViT) -> None:
    before = trunk.fingerprint
    size = Size(trunk, cells=2, classes=3)
    makers = steps(size, batch=2)
    assert {"engram", "engram, from the cache", "straightforward, all gradients"} <= makers.keys()
    for make in makers.values():
        make()()
    cached_step(size, batch=2, variants=3)()
    assert trunk.fingerprint == before
    assert not any(p.requires_grad for p in trunk.parameters())


def test_a_shape_has_the_size_of_its_name() -> None:
    assert trunk_macs(TrunkShape.of(shaped("ViT-Ti/32"))) < trunk_macs(
        TrunkShape.of(shaped("ti/16"))
    )
    assert shaped("ViT-S/16").config.width == 384
    with pytest.raises(EngramError, match="ViT-B/32"):
        shaped("ViT-XXL/3")


def test_the_document_has_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    threads = str(torch.get_num_threads())
    arguments = ["--tasks", "1,3", "--batch", "2", "--cells", "1", "--seconds", "0.001"]
    assert main(["bench", *arguments, "--threads", threads, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trunk"] == "pico"
    assert {"processor", "cores", "torch", "threads"} <= document["machine"].keys()
    rows = {(row["what"], row["tasks"]): row for row in document["forward"]}
    for what in ("engram", "straightforward", "separate models"):
        assert {(what, 1), (what, 3)} <= rows.keys()
    assert rows[PLAIN, 0]["ratio"] == 1
    assert rows["engram", 3]["limit"] > rows["engram", 1]["limit"] > 1
    assert {row["what"] for row in document["training"]} >= {PLAIN, "engram"}
    for row in (*document["forward"], *document["training"]):
        assert row["seconds"] > 0
        assert row["low"] <= row["ratio"] <= row["high"]


def test_long_loops_are_measured_in_part_and_say_so(trunk: ViT) -> None:
    from engram.experiments.bench import forward

    rows = forward(Size(trunk, seconds=0, least=1, passes=2), tasks=[5], batches=[1])
    notes = {row.what: row.note for row in rows}
    assert notes["separate models"] == "2 of 5 passes"
    assert notes["engram"] == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tasks", "0"], "from 1 on"),
        (["--batch", "two"], "numbers with commas"),
        (["--threads", "0"], "at least one"),
        (["--seconds", "nan"], "give a number above 0"),
        (["--shape", "big"], "ViT-B/32"),
        (["--shape", "ViT-B/32", "--backbone", "pico"], "give one"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_table_is_for_people() -> None:
    told = bench(tasks=[2], batches=[1], seconds=0.001)
    assert all(len(row) == len(told.columns) for row in told.table)
    assert dict(told.rows)["trunk"] == "pico"
