"""The settings of a new task reach its method, and what no method has is refused."""

import pytest

from engram.errors import EngramError
from engram.methods import METHODS
from engram.tasks.task_settings import TaskSettings


def test_settings_of_the_method_stand_beside_the_others() -> None:
    settings = TaskSettings.create({"regime": "memory", "cells": 7, "update": "add"})
    assert settings.method().settings() == {"cells": 7, "update": "add"}
    assert TaskSettings.create(settings.to_dict()) == settings


def test_a_setting_that_the_method_does_not_have_is_refused_by_name() -> None:
    settings = TaskSettings("head", method_settings={"cells": 3})
    with pytest.raises(EngramError, match="'cells'"):
        settings.method()
    assert settings.method(lenient=True).settings() == {}


def test_every_setting_that_is_a_flag_has_one() -> None:
    flags = {item.name for item in TaskSettings.flags()}
    methods = {"cells", "rank", "adapter_width", "queries", "bank", "update"}
    assert {"regime", "extends", "class_init"} | methods == flags
    assert set(METHODS["masked"].setting_names()) - flags == {"tokens", "after_norm"}
