"""The literal definitions against still more literal ones: loops over Python numbers, values by hand."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from polynl.functional import polynomial
from polynl.functional.efficient import efficient_attention_reference
from polynl.functional.latent_gnn import latent_gnn, latent_gnn_reference
from polynl.functional.non_local import (
    concatenation_attention_reference,
    non_local_elementwise_reference,
    non_local_reference,
    softmax_attention_reference,
)
from polynl.functional.poly_nl import poly_nl_elementwise_reference, poly_nl_reference
from polynl.functional.polynomial import ccp_reference
from polynl.functional.tesa import tesa_mode_reference

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
    expected = non_local_reference(x, w_theta, w_phi, w_g)
    assert_close(non_local_elementwise_reference(x, w_theta @ w_phi.T, w_g), expected)


@pytest.mark.parametrize(("n", "c"), SIZES)
def test_poly_nl_matrix_and_elementwise_forms_agree(n: int, c: int) -> None:
    x, weights = randn(n, c), matrices(3, c)
    assert_close(poly_nl_elementwise_reference(x, *weights), poly_nl_reference(x, *weights))


def test_gradients_of_matrix_and_elementwise_forms_agree() -> None:
    x, (w_theta, w_phi, w_g), dy = randn(4, 3).requires_grad_(), matrices(3, 3), randn(4, 3, seed=2)
    w_f = (w_theta @ w_phi.T).requires_grad_()
    matrix = non_local_reference(x, w_f, torch.eye(3), w_g)
    elementwise = non_local_elementwise_reference(x, w_f, w_g)
    for expected, actual in zip(
        torch.autograd.grad(matrix, (x, w_f), dy), torch.autograd.grad(elementwise, (x, w_f), dy), strict=True
    ):
        assert_close(actual, expected)

    weights = [w.requires_grad_() for w in matrices(3, 3)]
    matrix, elementwise = poly_nl_reference(x, *weights), poly_nl_elementwise_reference(x, *weights)
    for expected, actual in zip(
        torch.autograd.grad(matrix, (x, *weights), dy),
        torch.autograd.grad(elementwise, (x, *weights), dy),
        strict=True,
    ):
        assert_close(actual, expected)


def test_values_by_hand() -> None:
    x, one, two = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0]]), torch.tensor([[2.0]])
    # Φ is the mean of 2·1 and 2·9, that is 10; Σ x² is 10 as well.
    assert poly_nl_reference(x, one, two, one).tolist() == [[10.0], [30.0]]
    assert non_local_reference(x, one, two, one).tolist() == [[20.0], [60.0]]


def test_softmax_non_local_is_a_weighted_mean() -> None:
    theta, phi, g = randn(3, 2), randn(4, 2, seed=1), randn(4, 5, seed=2)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for i in range(3):
        weights = [math.exp(0.7 * float(theta[i] @ phi[j])) for j in range(4)]
        for j in range(4):
            expected[i] += weights[j] / sum(weights) * g[j]
    assert_close(softmax_attention_reference(theta, phi, g, scale=0.7), expected)


def test_concatenation_goes_over_pairs() -> None:
    theta, phi, g, w = randn(3, 2), randn(4, 2, seed=1), randn(4, 5, seed=2), randn(4, seed=3)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for i in range(3):
        for j in range(4):
            score = sum(float(w[k] * theta[i, k] + w[2 + k] * phi[j, k]) for k in range(2))
            expected[i] += max(score, 0.0) * g[j] / 4
    assert_close(concatenation_attention_reference(theta, phi, g, w), expected)


def test_unnormalised_efficient_with_one_head_is_non_local_divided_by_n() -> None:
    x, (w_q, w_k, w_v) = randn(5, 4), matrices(3, 4)
    actual = efficient_attention_reference(x @ w_q, x @ w_k, x @ w_v, heads=1, normalization="none")
    assert_close(actual, non_local_reference(x, w_q, w_k, w_v) / 5)


@pytest.mark.parametrize("normalization", ["softmax", "none"])
def test_efficient_heads_are_slices_of_neighbouring_channels(
    normalization: Literal["softmax", "none"],
) -> None:
    q, k, v = randn(5, 4), randn(5, 4, seed=1), randn(5, 6, seed=2)
    expected = [
        efficient_attention_reference(q[:, :2], k[:, :2], v[:, :3], 1, normalization),
        efficient_attention_reference(q[:, 2:], k[:, 2:], v[:, 3:], 1, normalization),
    ]
    assert_close(efficient_attention_reference(q, k, v, 2, normalization), torch.cat(expected, dim=1))


def test_efficient_softmax_axes() -> None:
    q, k, v = randn(3, 2), randn(4, 2, seed=1), randn(4, 5, seed=2)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for i in range(3):
        for d in range(2):
            for j in range(4):
                over_channels = q[i, d].exp() / sum(q[i, e].exp() for e in range(2))
                over_positions = k[j, d].exp() / sum(k[e, d].exp() for e in range(4))
                expected[i] += over_channels * over_positions * v[j]
    assert_close(efficient_attention_reference(q, k, v, 1, "softmax"), expected)


@pytest.mark.parametrize("symmetric", [False, True])
def test_latent_gnn_by_numbers(symmetric: bool) -> None:
    n, c, d = 4, 2, 3
    v, to_latent, from_latent = randn(n, c), randn(n, d, seed=1).abs(), randn(n, d, seed=2).abs()
    a, b = to_latent.tolist(), (to_latent if symmetric else from_latent).tolist()
    columns = [math.hypot(*column) for column in zip(*a, strict=True)]
    z = []
    for k in range(d):
        lengths = [math.hypot(*a[i]) if symmetric else columns[k] for i in range(n)]
        z.append([sum(a[i][k] / lengths[i] * float(v[i, j]) for i in range(n)) for j in range(c)])

    def cosine(k: int, m: int) -> float:
        return sum(p * q for p, q in zip(z[k], z[m], strict=True)) / math.hypot(*z[k]) / math.hypot(*z[m])

    expected = torch.zeros(n, c, dtype=torch.float64)
    for i in range(n):
        for k in range(d):
            total = sum(math.exp(cosine(k, m)) for m in range(d))
            for m in range(d):
                tie = b[i][k] / math.hypot(*b[i]) * math.exp(cosine(k, m)) / total
                expected[i] += tie * torch.tensor(z[m], dtype=torch.float64)
    assert_close(latent_gnn_reference(v, to_latent, None if symmetric else from_latent), expected)


@pytest.mark.parametrize("symmetric", [False, True])
def test_latent_gnn_is_its_reference_in_value_and_gradients(symmetric: bool) -> None:
    """Also at a position and a node that ReLU leaves without any tie."""
    inputs = [randn(2, 7, 4), *(randn(2, 7, 3, seed=seed) for seed in range(1, 2 if symmetric else 3))]
    for tie in inputs[1:]:
        tie[0, 2], tie[1, :, 1] = -1.0, -1.0
    inputs = [t.requires_grad_() for t in inputs]
    actual = latent_gnn(*inputs)
    expected = torch.stack([latent_gnn_reference(*sample) for sample in zip(*inputs, strict=True)])
    assert_close(actual, expected)
    dy = randn(*actual.shape, seed=5)
    for ours, literal in zip(
        torch.autograd.grad(actual, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        assert_close(ours, literal)


@pytest.mark.parametrize(
    ("axis", "equation"),
    [(0, "iab,kab,kxy->ixy"), (1, "aib,akb,xky->xiy"), (2, "abi,abk,xyk->xyi"), (-1, "abi,abk,xyk->xyi")],
)
def test_tesa_mode_contracts_all_axes_but_one(axis: int, equation: str) -> None:
    a, b, v = (randn(2, 3, 4, seed=seed) for seed in range(3))
    assert_close(tesa_mode_reference(a, b, v, axis), torch.einsum(equation, a, b, v))


def test_ccp_is_a_product_of_linear_factors() -> None:
    x, us, c = randn(5, 3), [randn(4, 3, seed=seed) for seed in range(1, 4)], randn(2, 4, seed=4)
    factors = (x @ us[0].T) * (x @ us[1].T + 1) * (x @ us[2].T + 1)
    assert_close(ccp_reference(x, us, c), factors @ c.T)


def test_every_dot_product_block_is_x_times_a_function_of_the_gram_matrix() -> None:
    n, c = 6, 3
    x, (w1, w2, w3) = randn(n, c), matrices(3, c)
    gram = x.T @ x / n
    assert_close(poly_nl_reference(x, w1, w2, w3), x @ (w1.T @ gram @ w2).diagonal().diag() @ w3)
    assert_close(non_local_reference(x, w1, w2, w3) / n, x @ (w1 @ w2.T @ gram @ w3))
    efficient = efficient_attention_reference(x @ w1, x @ w2, x @ w3, heads=1, normalization="none")
    assert_close(efficient, x @ (w1 @ w2.T @ gram @ w3))
    image = x.T.reshape(c, 2, 3)
    assert_close(tesa_mode_reference(image, image, image, axis=0).flatten(1).T, x @ (n * gram))


X, W, HEADS, IMAGE = randn(3, 2), matrices(3, 2), randn(3, 4), randn(2, 2, 3)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "non_local": (non_local_reference, (X, *W)),
    "non_local_elementwise": (non_local_elementwise_reference, (X, *W[:2])),
    "poly_nl": (poly_nl_reference, (X, *W)),
    "poly_nl_elementwise": (poly_nl_elementwise_reference, (X, *W)),
    "softmax_non_local": (partial(softmax_attention_reference, scale=0.5), (X, X + 1, X + 2)),
    "concatenation": (concatenation_attention_reference, (X, X + 1, X + 2, randn(4))),
    "efficient_softmax": (
        partial(efficient_attention_reference, heads=2, normalization="softmax"),
        (HEADS,) * 3,
    ),
    "efficient_none": (partial(efficient_attention_reference, heads=2, normalization="none"), (HEADS,) * 3),
    "latent_gnn": (latent_gnn_reference, (X, HEADS, HEADS + 1)),
    "latent_gnn_symmetric": (latent_gnn_reference, (X, HEADS)),
    "tesa_mode": (partial(tesa_mode_reference, axis=1), (IMAGE,) * 3),
    "ccp": (lambda x, u1, u2, c: ccp_reference(x, [u1, u2], c), (X, *W)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_differentiable_and_fp64_whatever_the_input(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    assert torch.autograd.gradcheck(function, [t.clone().requires_grad_() for t in inputs])
    single = [t.float() for t in inputs]
    actual, expected = function(*single), function(*[t.double() for t in single])
    assert actual.dtype == torch.float64
    assert torch.equal(actual, expected)


def test_batched_ccp_equals_the_reference() -> None:
    x, us, c = randn(2, 5, 3), [randn(4, 3, seed=seed) for seed in range(1, 4)], randn(3, 4, seed=4)
    bias = randn(3, seed=5)
    expected = torch.stack([ccp_reference(sample, us, c) for sample in x])
    assert_close(polynomial.ccp(x, us, c), expected)
    assert_close(polynomial.ccp(x, us, c, bias), expected + bias)
