"""The settings of a new task that `fit` and `sweep` share, apart from its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from engram.methods.method_flags import CLASS_INITS, DEFAULT_REGIME, REGIMES, MethodFlags
from engram.util.settings import setting

if TYPE_CHECKING:
    from engram.methods.method import Method
    from engram.tasks.spec import TaskSpec


@dataclass(frozen=True)
class TaskSettings:
    """A new task: its regime, what it extends, and settings of its method."""

    regime: str = setting(
        DEFAULT_REGIME, "the method, which says what trains", offers=tuple(REGIMES)
    )
    extends: tuple[str, ...] = setting(
        (), "an engram that the task reads; repeatable", metavar="T=FILE"
    )
    class_init: str = setting(
        "backbone", "initial class token: a copy of the backbone's, or random", choices=CLASS_INITS
    )
    method_settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def create(cls, settings: Mapping[str, Any]) -> TaskSettings:
        """Create from names and values in which settings of the method stand beside the others."""
        own = {item.name for item in fields(cls)}
        more = {name: value for name, value in settings.items() if name not in own}
        return cls(**{k: v for k, v in settings.items() if k in own}, method_settings=more)

    @classmethod
    def from_spec(cls, spec: TaskSpec) -> TaskSettings:
        """Settings that repeat a task, but for `class_init`, which no spec has."""
        flags = [item.name for item in fields(spec.method) if item.metadata.get("flag")]
        known = {name: getattr(spec.method, name) for name in flags}
        return cls(spec.regime, spec.extends, method_settings=known)

    @classmethod
    def flags(cls) -> list[Field[Any]]:
        """The fields of these settings and of all methods, once each: the flags of a command."""
        own = [item for item in fields(cls) if item.name != "method_settings"]
        return [*own, *fields(MethodFlags)]

    def method(self, regime: str | None = None, lenient: bool = False) -> Method:
        """The method with its settings; `lenient` leaves out those that it does not have."""
        from engram.methods import create_method, method_class

        regime, settings = regime or self.regime, dict(self.method_settings)
        if lenient:
            known = method_class(regime).setting_names()
            settings = {name: value for name, value in settings.items() if name in known}
        return create_method(regime, settings)

    def but(self, **changes: Any) -> TaskSettings:
        """A copy with other settings of the method."""
        return replace(self, method_settings={**self.method_settings, **changes})

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, as a recipe file has them."""
        own = {"regime": self.regime, "extends": self.extends, "class_init": self.class_init}
        return {**own, **self.method_settings}
