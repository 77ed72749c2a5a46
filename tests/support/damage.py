"""A thousand ways in which the file of an engram can be damaged."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import safetensors.torch
import torch
from tests.support.engrams import randomised, small_backbone

from engram import MemoryViT
from engram.store.engram import Engram
from engram.store.format import parse_engram, parse_header, read_engram
from engram.tasks.task import Task


class Originals:
    """Good files, and what is needed to attach each."""

    def __init__(self, folder: Path) -> None:
        self.backbone = small_backbone()
        model = MemoryViT(self.backbone)
        randomised(model.add_task("a", classes=["rose", "tulip", "é"], cells=3))
        randomised(
            model.add_task("b", classes=4, regime="masked+adapter", extends=["a"], adapter_width=2)
        )
        randomised(model.add_task("h", classes=2, regime="mlp-head"))
        randomised(model.add_task("s", classes=2, regime="side", rank=2))
        randomised(model.add_task("r", classes=2, regime="readout"))
        recipe = {"lr": 0.1, "seeds": [1, 2], "deep": {"er": None}}
        self.paths = [
            model.save(name, folder / f"{name}.safetensors", metrics={"x": 1.5}, recipe=recipe)
            for name in ("a", "b", "h", "s", "r")
        ]
        self.engrams = [read_engram(path) for path in self.paths]

    def attach(self, which: int, path: Path) -> tuple[Engram, Task]:
        model = MemoryViT(self.backbone)
        engram = read_engram(path)
        if which == 1:
            model.attach(self.engrams[0])
        return engram, model.attach(engram)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header that safetensors wrote, and the bytes of the tensors."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(outer: dict[str, Any] | bytes, body: bytes) -> bytes:
    """The reverse of `split`."""
    text = outer if isinstance(outer, bytes) else json.dumps(outer).encode()
    return struct.pack("<Q", len(text)) + text + body


def sealed(outer: dict[str, Any], header: Any) -> dict[str, Any]:
    """With another engram header, and the hash that belongs to it."""
    text = header if isinstance(header, str) else json.dumps(header)
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return {**outer, "__metadata__": {"engram": text, "sha256": digest}}


def with_content(header: dict[str, Any], data: bytes) -> dict[str, Any]:
    """With the content hash that belongs to header and tensors, where they have one at all."""
    try:
        tensors = safetensors.torch.load(data)
        return {**header, "content": parse_header(Path("x"), header, tensors).content}
    except Exception:
        return header


def flipped(data: bytes, random: Random) -> bytes:
    out = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 8])):
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)
    return bytes(out)


def cut(data: bytes, random: Random) -> bytes:
    return data[: random.choice([random.randrange(len(data)), random.randrange(9)])]


def overwritten(data: bytes, random: Random) -> bytes:
    start, length = random.randrange(len(data)), random.randrange(1, 400)
    kind = random.randrange(4)
    if kind == 0:
        return data[:start] + bytes(length) + data[start + length :]
    if kind == 1:
        return data[:start] + random.randbytes(length) + data[start + length :]
    if kind == 2:
        return data[:start] + random.randbytes(length) + data[start:]
    return data + random.randbytes(length)


ODD = [
    *(None, True, False, -1, 0, 1, 7, 10**30, -(10**18), 1.5, float("nan"), float("inf"), 1e308),
    *("", "x", "base", "../x", "\x00", "\n", "\ud800", "é" * 3, "x" * 100_000, "0" * 64),
    *([], {}, [[]], [None], ["x"], [1, 2], [10**9, 10**9], {"a": 1}, {"a": "0" * 64}, [0.5] * 3),
]


def spots(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value of a JSON document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inside:
        yield (*at, key)
        if isinstance(part, (dict, list)):
            yield from spots(part, (*at, key))


def other_header(data: bytes, random: Random) -> bytes:
    """A field that is wrong, missing or unknown; hashes as they were, or made again."""
    outer, body = split(data)
    header = json.loads(outer["__metadata__"]["engram"])
    *way, last = random.choice(list(spots(header)))
    place = header
    for key in way:
        place = place[key]
    change = random.randrange(8)
    if change == 0:
        del place[last]
    elif change == 1 and isinstance(place, dict):
        place["unknown"] = random.choice(ODD)
    else:
        place[last] = random.choice(ODD)
    hashes = random.randrange(3)
    if hashes == 0:  # as they were
        outer["__metadata__"]["engram"] = json.dumps(header)
        return joined(outer, body)
    if hashes == 2 and isinstance(header, dict):
        header = with_content(header, data)
    return joined(sealed(outer, header), body)


def other_outside(data: bytes, random: Random) -> bytes:
    """Something wrong in what safetensors itself keeps about the tensors."""
    outer, body = split(data)
    *way, last = random.choice(list(spots(outer)))
    place = outer
    for key in way:
        place = place[key]
    if random.random() < 0.2:
        del place[last]
    else:
        place[last] = random.choice(ODD)
    return joined(outer, body)


def other_tensors(data: bytes, random: Random) -> bytes:
    """Tensors swapped, renamed, cut, left out, or with other values; the header is untouched."""
    outer, _ = split(data)
    header = json.loads(outer["__metadata__"]["engram"])
    tensors = safetensors.torch.load(data)
    one, two = random.sample(sorted(tensors), 2)
    change = random.randrange(7)
    if change == 0:
        tensors[one], tensors[two] = tensors[two], tensors[one]
    elif change == 1:
        tensors["renamed"] = tensors.pop(one)
    elif change == 2:
        tensors["more"] = torch.zeros(3)
    elif change == 3:
        del tensors[one]
    elif change == 4:
        tensors[one] = tensors[one].flatten()[:-1].clone()
    elif change == 5:
        tensors[one] = tensors[one].flip(0)  # of one row: the same
    else:
        tensors[one] = tensors[one] * (1 + 2**-20)
    if change in (1, 2, 3, 4) and random.random() < 0.5:
        header["content"] = hashlib.sha256(random.randbytes(8)).hexdigest()
    return safetensors.torch.save(tensors, sealed(outer, header)["__metadata__"])


def not_finite(data: bytes, random: Random) -> bytes:
    """NaN or infinity, with all hashes made again."""
    outer, _ = split(data)
    header = json.loads(outer["__metadata__"]["engram"])
    tensors = safetensors.torch.load(data)
    flat = tensors[random.choice(sorted(tensors))].view(-1)
    flat[random.randrange(len(flat))] = random.choice([torch.nan, torch.inf, -torch.inf])
    header["content"] = replace(parse_engram(data, "x"), tensors=tensors).content
    return safetensors.torch.save(tensors, sealed(outer, header)["__metadata__"])


def other_dtype(data: bytes, random: Random) -> bytes:
    """The same numbers as another type, with all hashes made again; or only called another type."""
    outer, body = split(data)
    header = json.loads(outer["__metadata__"]["engram"])
    tensors = safetensors.torch.load(data)
    name = random.choice(sorted(tensors))
    if random.random() < 0.5:
        types = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool]
        tensors[name] = tensors[name].to(random.choice(types))
        header["content"] = replace(parse_engram(data, "x"), tensors=tensors).content
        return safetensors.torch.save(tensors, sealed(outer, header)["__metadata__"])
    entry = outer[name]
    entry["dtype"] = random.choice(["F64", "F16", "I32", "U8", "BOOL", "F8_E4M3", "C64", "X9"])
    if entry["dtype"] == "U8":
        entry["shape"] = [*entry["shape"], 4]
    return joined(outer, body)


def huge(data: bytes, random: Random) -> bytes:
    """Sizes that no machine has."""
    outer, body = split(data)
    name = random.choice([key for key in outer if key != "__metadata__"])
    big = random.choice([2**31, 2**40, 2**62, 2**63, 2**64 - 1, 2**64, 10**30])
    change = random.randrange(5)
    if change == 0:
        return struct.pack("<Q", min(big, 2**64 - 1)) + data[8:]
    if change == 1:
        outer[name]["shape"] = [big]
    elif change == 2:
        outer[name]["shape"] = [big, 0, big]
    elif change == 3:
        outer[name]["data_offsets"] = [0, big]
    else:
        outer[name]["data_offsets"] = [big, big + 4]
    if change == 2 and random.random() < 0.5:
        outer[name]["data_offsets"] = [0, 0]
    return joined(outer, body)


def odd_json(data: bytes, random: Random) -> bytes:
    """Nested without end, keys twice, bytes that are no text, texts that are no JSON."""
    outer, body = split(data)
    header = json.loads(outer["__metadata__"]["engram"])
    text = json.dumps(header)
    whole = json.dumps(outer).encode()
    depth = random.choice([50, 99, 200, 400, 900, 5_000, 200_000])
    nest = random.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
    change = random.randrange(8)
    if change == 0:
        where = random.choice(["metrics", "recipe", "task", "preprocessing", "created"])
        header[where] = "HERE"
        return joined(sealed(outer, json.dumps(header).replace('"HERE"', nest)), body)
    if change == 1:
        return joined(sealed(outer, nest), body)
    if change == 2:
        return joined(
            whole.replace(b'"__metadata__": ', f'"x": {nest}, "__metadata__": '.encode()), body
        )
    if change == 3:  # the last of two equal keys counts
        key = random.choice(sorted(header))
        twice = json.dumps({key: random.choice(ODD)})[1:-1]
        again = (
            text[:-1] + ", " + twice + "}"
            if random.random() < 0.5
            else "{" + twice + ", " + text[1:]
        )
        return joined(sealed(outer, again), body)
    if change == 4:
        first = next(key for key in outer if key != "__metadata__")
        again = json.dumps({first: outer[first]})[1:-1].encode()
        return joined(whole[:-1] + b", " + again + b"}", body)
    if change == 5:
        at = random.randrange(len(whole))
        return joined(
            whole[:at] + random.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80"]) + whole[at:], body
        )
    if change == 6:
        return joined(
            sealed(outer, random.choice(["", "null", "3", "[]", "{}", "{", "\ud800"])), body
        )
    space = random.choice([" ", "\n", "\t"]) * random.randrange(1, 40)
    return joined(whole[:1] + space.encode() + whole[1:], body)  # changes nothing


# How often each kind of damage is tried.
DAMAGE = {
    flipped: 300,
    cut: 100,
    overwritten: 100,
    other_header: 260,
    other_outside: 80,
    other_tensors: 60,
    not_finite: 20,
    other_dtype: 30,
    huge: 40,
    odd_json: 80,
}
