"""Flags from settings: a dataclass is the flags is the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from engram.errors import EngramError

Number = TypeVar("Number", int, float)


def flags_of(
    settings_class: type, defaults: Any = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every setting of a dataclass that it has not itself, as `flags`.

    The help shows the settings' own defaults, or those of the instance `defaults`.
    """

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        own = signature(command)
        hints = get_type_hints(command, include_extras=True)
        parameters = [
            p.replace(annotation=hints[p.name])
            for p in own.parameters.values()
            if p.name != "flags"
        ]
        settings = [item for item in fields(settings_class) if item.name not in own.parameters]
        for item in settings:
            kind = {"int": int, "float": float, "str": str}[str(item.type)]
            about, choices = item.metadata["about"], item.metadata["choices"]
            text = f"{about[0].upper()}{about[1:]}"
            text += f" ({', '.join(choices)})" if choices else ""
            default = item.default if defaults is None else getattr(defaults, item.name)
            flag = typer.Option(
                f"--{item.name.replace('_', '-')}",
                help=f"{text} [{default}]",
                show_default=False,
            )
            hint = Annotated[kind | None, flag]  # type: ignore[valid-type]
            parameters.append(
                Parameter(item.name, Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            )

        def called(**values: Any) -> None:
            flags = {item.name: values.pop(item.name) for item in settings}
            command(**values, flags=flags)

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__annotations__ = {}
        called.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return called

    return with_flags


def numbers(flag: str, text: str, kind: type[Number]) -> list[Number]:
    """What a flag lists with commas between; anything else is an EngramError."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise EngramError(
            f"{flag} is {text!r}; give numbers with commas between them, such as 1,5."
        ) from None
