"""A weight in the span of the images is as long, and answers the same, as the one it stands for."""

from __future__ import annotations

import pytest
import torch

from engram.train.heads.dual_solver import DualSolver, Products


@pytest.mark.parametrize("repeated", [False, True])
def test_coordinates_answer_as_the_weight_does(repeated: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(20, 300, generator=random) * torch.logspace(0, -3, 300)
    if repeated:
        x[7] = x[3]
    weight = torch.randn(5, 20, generator=random) @ x  # in the span
    span = DualSolver(x.double() @ x.double().T, lambda: x)
    inner = span.coordinates @ span.coordinates.T
    torch.testing.assert_close(inner, x @ x.T, rtol=1e-4, atol=1e-5)
    a = torch.linalg.lstsq(span.coordinates.double(), (x @ weight.T).double()).solution.T.float()
    torch.testing.assert_close(x @ span.weight(a).T, x @ weight.T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(span.weight(a).norm(dim=1), weight.norm(dim=1), rtol=1e-3, atol=0)
    torch.testing.assert_close(a.norm(dim=1), weight.norm(dim=1), rtol=1e-3, atol=0)


def test_products_by_block_are_those_of_the_scaled_features() -> None:
    x = torch.randn(12, 90)
    products = Products(x)
    for scale in (0.1, 3.0):
        scaled = torch.cat([x[:, :20], x[:, 50:90] * scale], 1)
        whole = DualSolver(scaled.double() @ scaled.double().T, lambda seen=scaled: seen)
        found = products.solver([(0, 20, 1.0), (50, 90, scale)])
        torch.testing.assert_close(found.coordinates, whole.coordinates, rtol=1e-5, atol=1e-6)
        a = torch.randn(3, 12)
        torch.testing.assert_close(found.weight(a), whole.weight(a), rtol=1e-4, atol=1e-5)


def test_features_that_are_all_zero_span_nothing() -> None:
    span = DualSolver(torch.zeros(4, 4).double(), lambda: torch.zeros(4, 10))
    assert torch.equal(span.weight(torch.ones(2, 4)), torch.zeros(2, 10))
    assert span.coordinates.abs().max() < 1e-3
