"""Random backbones: the same for a seed, and of every shape that is asked for."""

import torch

from engram import random_backbone


def test_random_backbones_are_repeatable_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = random_backbone(seed=3), random_backbone(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.fingerprint == second.fingerprint
    assert not first.training


def test_a_random_backbone_has_the_options_it_was_given() -> None:
    backbone = random_backbone(
        image_size=16, patch=4, width=32, depth=3, heads=2, registers=2, classes=0
    )
    config = backbone.config
    assert (config.image_size, config.patch, config.width) == ((16, 16), 4, 32)
    assert (config.depth, config.heads, config.registers) == (3, 2, 2)
    assert backbone.head is None
    assert backbone.tokens(torch.rand(1, 3, 16, 16)).shape == (1, 1 + 2 + 16, 32)
    assert random_backbone(seed=1).fingerprint != random_backbone(seed=2).fingerprint
