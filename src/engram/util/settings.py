"""Settings as a dataclass: each field carries its help text and the values it allows.

The command line makes flags of the fields, and the guides have a row for each. `check` refuses a
wrong value with a sentence that names the setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from engram.errors import EngramError, flag
from engram.util.schema import Array, Boolean, Integer, Invalid, Nullable, Real, Rule, String

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


#: The values that were given for a run, by settings class; no defaults.
Given = Mapping[type, dict[str, Any]]


def setting(
    default: Any,
    about: str,
    *,
    least: Any = 0,
    most: Any = None,
    below: float = math.inf,
    choices: tuple[str, ...] = (),
    offers: tuple[str, ...] = (),
    group: str = "",
    metavar: str = "",
    label: str = "",
    shown: str = "",
    kind: type = int,
    flag: bool = True,
) -> Any:
    """A field of a settings dataclass, with a line of help and the values that it allows.

    `least`, `most` and `below` are about numbers, `choices` are the only texts, and `offers` those
    that a shell completes where others are allowed too. `kind` is the type where the default is
    None. `--help` lists the flag in the panel `group`, with `metavar` in place of the value, and
    `shown` in place of a default that depends on the machine. Descriptions of a task always show a
    setting with a `label`, by that name. Without `flag`, the command line has none.
    """
    kind = kind if default is None else type(default)
    rules: dict[type, Rule] = {
        int: Integer(least, most),
        float: Real(least, most, below),
        bool: Boolean(),
        str: String(choices=choices),
        tuple: Array(String()),
    }
    metadata = {
        "about": about,
        "kind": kind,
        "rule": Nullable(rules[kind]) if default is None else rules[kind],
        "choices": choices,
        "offers": offers or choices,
        "group": group,
        "metavar": metavar,
        "label": label,
        "shown": shown or str(default),
        "flag": flag,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ComputeSettings:
    """Settings that several commands have: where to compute, and how exactly."""

    device: str = setting(
        "auto",
        "where to compute: auto (an accelerator if there is one), cpu, cuda, cuda:1, mps, xpu",
    )
    precision: str = setting(
        "fp32",
        "numeric precision of forward passes; bf16 and fp16 change answers slightly",
        choices=("fp32", "bf16", "fp16"),
    )
    backbone_dtype: str = setting(
        "fp32",
        "type of the backbone's weights; bf16 takes half the memory and computes in bf16",
        choices=("fp32", "bf16"),
    )
    engine: str = setting(
        "torch",
        "what runs the model: PyTorch, or onnxruntime or OpenVINO on the CPU",
        choices=("torch", "onnx", "onnx-int8", "openvino", "openvino-fp32", "openvino-int8"),
    )


def setting_of(settings_class: type, name: str, **changes: Any) -> Any:
    """A field with the same setting as in another class, but for `group` or `metavar`."""
    found = next(item for item in fields(settings_class) if item.name == name)
    return field(default=found.default, metadata={**found.metadata, **changes})


def settings_fields(settings_class: type) -> list[Field[Any]]:
    """The settings of a class that are flags: its fields, or what its `flags` lists."""
    listed = getattr(settings_class, "flags", None)
    return listed() if listed is not None else list(fields(settings_class))


def check(settings: DataclassInstance) -> None:
    """Refuse a wrong type, an unknown choice or a number out of range with an EngramError."""
    for item in (item for item in fields(settings) if item.metadata):
        check_value(item, getattr(settings, item.name))


def check_value(item: Field[Any], value: Any) -> None:
    """Refuse a value that a setting cannot have with an EngramError."""
    try:
        item.metadata["rule"].check(value, flag(item.name))
    except Invalid as error:
        raise EngramError(f"{error}.") from None
