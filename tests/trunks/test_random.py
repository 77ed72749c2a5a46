"""Random trunks: the same for a seed, and of every shape that is asked for."""

import torch

from engram import random_trunk


def test_random_trunks_are_repeatable_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second = random_trunk(seed=3), random_trunk(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.fingerprint == second.fingerprint
    assert not first.training


def test_a_random_trunk_has_the_options_it_was_given() -> None:
    trunk = random_trunk(image_size=16, patch=4, width=32, depth=3, heads=2, registers=2, classes=0)
    config = trunk.config
    assert (config.image_size, config.patch, config.width) == ((16, 16), 4, 32)
    assert (config.depth, config.heads, config.registers) == (3, 2, 2)
    assert trunk.head is None
    assert trunk.tokens(torch.rand(1, 3, 16, 16)).shape == (1, 1 + 2 + 16, 32)
    assert random_trunk(seed=1).fingerprint != random_trunk(seed=2).fingerprint
