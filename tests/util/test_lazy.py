"""Names are imported when they are first used, and a wrong one is what Python says it is."""

import subprocess
import sys

import pytest

import engram


@pytest.mark.system
def test_names_of_folders_are_reached_after_importing_the_package_alone() -> None:
    code = (
        "import sys, engram; before = 'torch' in sys.modules; "
        "engram.data.load, engram.export.export_onnx, engram.store.legacy.convert; "
        "engram.tasks.costs.task_costs; print(before, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_name_is_looked_up_once() -> None:
    first = engram.data.load
    assert vars(engram.data)["load"] is first


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"engram\.data.* has no attribute 'lod'"):
        engram.data.lod  # noqa: B018
