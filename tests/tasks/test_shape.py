"""The shape of a trunk: read from it or from its configuration, and refused where it cannot be."""

import pytest

from engram import EngramError, random_trunk
from engram.tasks.shape import TrunkShape


def test_a_trunk_with_another_head_has_as_many_parameters() -> None:
    assert TrunkShape.of(random_trunk(classes=3)) == TrunkShape.of(random_trunk(classes=0))


@pytest.mark.parametrize("wrong", [{"patch": 0}, {"depth": 10**15}, {"image_size": (4, 32)}])
def test_a_shape_that_no_trunk_has_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EngramError, match="No trunk"):
        TrunkShape(**{**vars(TrunkShape.of(random_trunk())), **wrong})


def test_a_configuration_has_the_shape_of_its_trunk() -> None:
    trunk = random_trunk(registers=2, width=32, heads=2)
    shape = TrunkShape.of(trunk.config)
    assert shape == TrunkShape.of(trunk)
    assert (shape.width, shape.prefix) == (32, 3)
    body = [p for name, p in trunk.named_parameters() if not name.startswith("head.")]
    assert shape.parameters == sum(p.numel() for p in body)
