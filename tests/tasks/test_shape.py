"""The shape of a backbone: from it or its configuration, and refused where impossible."""

import pytest

from engram import EngramError, random_backbone
from engram.backbones.shape import BackboneShape


def test_a_backbone_with_another_head_has_as_many_parameters() -> None:
    assert BackboneShape.measure(random_backbone(classes=3)) == BackboneShape.measure(
        random_backbone(classes=0)
    )


@pytest.mark.parametrize("wrong", [{"patch": 0}, {"depth": 10**15}, {"image_size": (4, 32)}])
def test_a_shape_that_no_backbone_has_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EngramError, match="No backbone"):
        BackboneShape(**{**vars(BackboneShape.measure(random_backbone())), **wrong})


def test_a_configuration_has_the_shape_of_its_backbone() -> None:
    backbone = random_backbone(registers=2, width=32, heads=2)
    shape = BackboneShape.measure(backbone.config)
    assert shape == BackboneShape.measure(backbone)
    assert (shape.width, shape.prefix) == (32, 3)
    body = [p for name, p in backbone.named_parameters() if not name.startswith("head.")]
    assert shape.parameters == sum(p.numel() for p in body)
