"""The literal definitions against still more literal ones: loops over Python numbers, values by hand."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from polynl.functional import polynomial, reference

SIZES = [(1, 1), (2, 3), (7, 4), (5, 1)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def matrices(count: int, c: int, seed: int = 1) -> list[Tensor]:
    return list(randn(count, c, c, seed=seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n", "c"), SIZES)
def test_non_local_matrix_and_elementwise_forms_agree(n: int, c: int) -> None:
    x, (w_theta, w_phi, w_g) = randn(n, c), matrices(3, c)
    expected = reference.non_local(x, w_theta, w_phi, w_g)
    assert_close(reference.non_local_elementwise(x, w_theta @ w_phi.T, w_g), expected)


@pytest.mark.parametrize(("n", "c"), SIZES)
def test_poly_nl_matrix_and_elementwise_forms_agree(n: int, c: int) -> None:
    x, weights = randn(n, c), matrices(3, c)
    assert_close(reference.poly_nl_elementwise(x, *weights), reference.poly_nl(x, *weights))


def test_gradients_of_matrix_and_elementwise_forms_agree() -> None:
    x, (w_theta, w_phi, w_g), dy = randn(4, 3).requires_grad_(), matrices(3, 3), randn(4, 3, seed=2)
    w_f = (w_theta @ w_phi.T).requires_grad_()
    matrix = reference.non_local(x, w_f, torch.eye(3), w_g)
    elementwise = reference.non_local_elementwise(x, w_f, w_g)
    for expected, actual in zip(
        torch.autograd.grad(matrix, (x, w_f), dy), torch.autograd.grad(elementwise, (x, w_f), dy), strict=True
    ):
        assert_close(actual, expected)

    weights = [w.requires_grad_() for w in matrices(3, 3)]
    matrix, elementwise = reference.poly_nl(x, *weights), reference.poly_nl_elementwise(x, *weights)
    for expected, actual in zip(
        torch.autograd.grad(matrix, (x, *weights), dy),
        torch.autograd.grad(elementwise, (x, *weights), dy),
        strict=True,
    ):
        assert_close(actual, expected)


def test_values_by_hand() -> None:
    x, one, two = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0]]), torch.tensor([[2.0]])
    # Φ is the mean of 2·1 and 2·9, that is 10; Σ x² is 10 as well.
    assert reference.poly_nl(x, one, two, one).tolist() == [[10.0], [30.0]]
    assert reference.non_local(x, one, two, one).tolist() == [[20.0], [60.0]]


def test_softmax_non_local_is_a_weighted_mean() -> None:
    theta, phi, g = randn(3, 2), randn(4, 2, seed=1), randn(4, 5, seed=2)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for i in range(3):
        weights = [math.exp(0.7 * float(theta[i] @ phi[j])) for j in range(4)]
        for j in range(4):
            expected[i] += weights[j] / sum(weights) * g[j]
    assert_close(reference.softmax_non_local(theta, phi, g, scale=0.7), expected)


def test_concatenation_goes_over_pairs() -> None:
    theta, phi, g, w = randn(3, 2), randn(4, 2, seed=1), randn(4, 5, seed=2), randn(4, seed=3)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for i in range(3):
        for j in range(4):
            score = sum(float(w[k] * theta[i, k] + w[2 + k] * phi[j, k]) for k in range(2))
            expected[i] += max(score, 0.0) * g[j] / 4
    assert_close(reference.concatenation(theta, phi, g, w), expected)


def test_unnormalised_efficient_with_one_head_is_non_local_divided_by_n() -> None:
    x, (w_q, w_k, w_v) = randn(5, 4), matrices(3, 4)
    actual = reference.efficient(x @ w_q, x @ w_k, x @ w_v, heads=1, normalization="none")
    assert_close(actual, reference.non_local(x, w_q, w_k, w_v) / 5)


@pytest.mark.parametrize("normalization", ["softmax", "none"])
def test_efficient_heads_are_slices_of_neighbouring_channels(
    normalization: Literal["softmax", "none"],
) -> None:
    q, k, v = randn(5, 4), randn(5, 4, seed=1), randn(5, 6, seed=2)
    expected = [
        reference.efficient(q[:, :2], k[:, :2], v[:, :3], 1, normalization),
        reference.efficient(q[:, 2:], k[:, 2:], v[:, 3:], 1, normalization),
    ]
    assert_close(reference.efficient(q, k, v, 2, normalization), torch.cat(expected, dim=1))


def test_efficient_softmax_axes() -> None:
    q, k, v = randn(3, 2), randn(4, 2, seed=1), randn(4, 5, seed=2)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for i in range(3):
        for d in range(2):
            for j in range(4):
                over_channels = q[i, d].exp() / sum(q[i, e].exp() for e in range(2))
                over_positions = k[j, d].exp() / sum(k[e, d].exp() for e in range(4))
                expected[i] += over_channels * over_positions * v[j]
    assert_close(reference.efficient(q, k, v, 1, "softmax"), expected)


@pytest.mark.parametrize(
    ("axis", "equation"),
    [(0, "iab,kab,kxy->ixy"), (1, "aib,akb,xky->xiy"), (2, "abi,abk,xyk->xyi"), (-1, "abi,abk,xyk->xyi")],
)
def test_tesa_mode_contracts_all_axes_but_one(axis: int, equation: str) -> None:
    a, b, v = (randn(2, 3, 4, seed=seed) for seed in range(3))
    assert_close(reference.tesa_mode(a, b, v, axis), torch.einsum(equation, a, b, v))


def test_ccp_is_a_product_of_linear_factors() -> None:
    x, us, c = randn(5, 3), [randn(4, 3, seed=seed) for seed in range(1, 4)], randn(2, 4, seed=4)
    factors = (x @ us[0].T) * (x @ us[1].T + 1) * (x @ us[2].T + 1)
    assert_close(reference.ccp(x, us, c), factors @ c.T)


def test_every_dot_product_block_is_x_times_a_function_of_the_gram_matrix() -> None:
    n, c = 6, 3
    x, (w1, w2, w3) = randn(n, c), matrices(3, c)
    gram = x.T @ x / n
    assert_close(reference.poly_nl(x, w1, w2, w3), x @ (w1.T @ gram @ w2).diagonal().diag() @ w3)
    assert_close(reference.non_local(x, w1, w2, w3) / n, x @ (w1 @ w2.T @ gram @ w3))
    efficient = reference.efficient(x @ w1, x @ w2, x @ w3, heads=1, normalization="none")
    assert_close(efficient, x @ (w1 @ w2.T @ gram @ w3))
    image = x.T.reshape(c, 2, 3)
    assert_close(reference.tesa_mode(image, image, image, axis=0).flatten(1).T, x @ (n * gram))


X, W, HEADS, IMAGE = randn(3, 2), matrices(3, 2), randn(3, 4), randn(2, 2, 3)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "non_local": (reference.non_local, (X, *W)),
    "non_local_elementwise": (reference.non_local_elementwise, (X, *W[:2])),
    "poly_nl": (reference.poly_nl, (X, *W)),
    "poly_nl_elementwise": (reference.poly_nl_elementwise, (X, *W)),
    "softmax_non_local": (partial(reference.softmax_non_local, scale=0.5), (X, X + 1, X + 2)),
    "concatenation": (reference.concatenation, (X, X + 1, X + 2, randn(4))),
    "efficient_softmax": (partial(reference.efficient, heads=2, normalization="softmax"), (HEADS,) * 3),
    "efficient_none": (partial(reference.efficient, heads=2, normalization="none"), (HEADS,) * 3),
    "tesa_mode": (partial(reference.tesa_mode, axis=1), (IMAGE,) * 3),
    "ccp": (lambda x, u1, u2, c: reference.ccp(x, [u1, u2], c), (X, *W)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_differentiable_and_fp64_whatever_the_input(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    assert torch.autograd.gradcheck(function, [t.clone().requires_grad_() for t in inputs])
    single = [t.float() for t in inputs]
    actual, expected = function(*single), function(*[t.double() for t in single])
    assert actual.dtype == torch.float64
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("heads", [0, 3])
def test_efficient_refuses_heads(heads: int) -> None:
    with pytest.raises(ValueError, match=f"heads={heads}: expected a divisor of the 4 channels of k"):
        reference.efficient(HEADS, HEADS, HEADS, heads, "none")


def test_efficient_refuses_other_normalizations() -> None:
    # A runtime type checker, where one is on, is first to refuse.
    with pytest.raises((ValueError, TypeError), match="normalization"):
        reference.efficient(HEADS, HEADS, HEADS, 2, "sofmax")  # type: ignore[arg-type]


def test_batched_ccp_equals_the_reference() -> None:
    x, us, c = randn(2, 5, 3), [randn(4, 3, seed=seed) for seed in range(1, 4)], randn(3, 4, seed=4)
    bias = randn(3, seed=5)
    expected = torch.stack([reference.ccp(sample, us, c) for sample in x])
    assert_close(polynomial.ccp(x, us, c), expected)
    assert_close(polynomial.ccp(x, us, c, bias), expected + bias)
