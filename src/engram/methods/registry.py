"""The methods by regime, and those of others: registered, or announced by a package."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from engram.errors import EngramError
from engram.methods.head import Base, CosineHead
from engram.methods.method import Method, OwnPassMethod, SharedPassMethod
from engram.methods.method_flags import AVERAGES, REGIMES

#: The methods by regime, in the order of tables. `Base` is the backbone itself, and no regime.
METHODS: dict[str, type[Method]] = {
    regime: getattr(import_module(f"engram.methods.{module}"), name)
    for regime, (module, name) in (
        (key, path.split(":")) for key, path in (REGIMES | AVERAGES).items()
    )
}
#: Methods of tasks that are made of something else than a choice of regime, such as words.
MADE: dict[str, type[Method]] = {CosineHead.name: CosineHead}
#: Where packages announce methods: an entry point is named after the regime.
ENTRY_POINTS = "engram.methods"


def register(method: type[Method]) -> type[Method]:
    """Add a method of your own, so that it can be trained, saved, attached, exported and served.

    A package can announce it instead, as an entry point `engram.methods` that is named after the
    regime: the commands then find it, too.

    Args:
        method: A subclass of `engram.methods.SharedPassMethod` (or `OwnPassMethod`), a frozen
            dataclass.

    Returns:
        The class itself, so that it can be used as a decorator.

    Raises:
        EngramError: The name is taken by another class, or is no name of a regime.

    Examples:
        >>> class Linear(engram.methods.Head):
        ...     name = "my-head"
        >>> engram.register(Linear)
        <class 'Linear'>
    """
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not name or name in (Base.name, "auto"):
        raise EngramError(
            f"{method!r} cannot be registered: give the class an attribute `name`, a text other "
            "than 'base' and 'auto'."
        )
    if not issubclass(method, (SharedPassMethod, OwnPassMethod)):
        raise EngramError(
            f"{method!r} cannot be registered: it has to be a subclass of SharedPassMethod, or of "
            "OwnPassMethod if it changes the backbone's own tokens."
        )
    known = MADE.get(name) or METHODS.get(name)
    if known is not None and known.__qualname__ != method.__qualname__:
        raise EngramError(
            f"The regime {name!r} is taken by {known.__qualname__}; choose another name."
        )
    METHODS[name] = method
    return method


def method_class(regime: str) -> type[Method]:
    """The method of a regime; an EngramError that names it if none is registered."""
    if regime in MADE:
        return MADE[regime]
    if regime not in METHODS:
        for entry in entry_points(group=ENTRY_POINTS, name=regime):
            register(entry.load())
    if regime not in METHODS:
        raise EngramError(
            f"There is no regime {regime!r}; choose one of {', '.join(METHODS)}, or register the "
            "method first (engram.register), if it is one of your own."
        )
    return METHODS[regime]


def create_method(regime: str, settings: dict[str, object]) -> Method:
    """A method with settings; an EngramError names a setting that it does not have."""
    method = method_class(regime)
    known = method.setting_names()
    for name in settings:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise EngramError(f"The regime {regime!r} has no setting {name!r}: {has}.")
    return method(**settings)
