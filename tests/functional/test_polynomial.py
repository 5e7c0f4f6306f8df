"""The paper's claims about third-order polynomials, each as a computation on a small feature map."""

import math
from collections.abc import Callable
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from polynl.functional import polynomial
from polynl.functional.efficient import efficient_attention_reference
from polynl.functional.non_local import (
    concatenation_attention_reference,
    non_local_reference,
    softmax_attention_reference,
)
from polynl.functional.poly_nl import poly_nl_reference
from polynl.functional.polynomial import (
    ccp_reference,
    is_third_order,
    third_order,
    third_order_elementwise,
    third_order_residual,
    third_order_tensor,
    triplets,
)
from polynl.functional.tesa import tesa_mode_reference

# Four positions as a 2×2 map, so that TESA has its two spatial modes.
N, C = 4, 2


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


W1, W2, W3 = randn(3, C, C, seed=1)
W_PAIR = randn(2 * C, seed=2)


def poly_nl(x: Tensor) -> Tensor:
    return poly_nl_reference(x, W1, W2, W3)


def non_local(x: Tensor) -> Tensor:
    return non_local_reference(x, W1, W2, W3)


def efficient(x: Tensor) -> Tensor:
    return efficient_attention_reference(x @ W1, x @ W2, x @ W3, heads=2, normalization="none")


def tesa(x: Tensor) -> Tensor:
    a, b, v = ((x @ w).T.reshape(C, 2, 2) for w in (W1, W2, W3))
    modes = [tesa_mode_reference(a, b, v, axis) for axis in range(3)]
    return torch.stack(modes).sum(dim=0).flatten(1).T


def tesa_channels(x: Tensor) -> Tensor:
    image = x.T.reshape(C, 2, 2)
    return tesa_mode_reference(image, image, image, axis=0).flatten(1).T


CUBIC: dict[str, Callable[[Tensor], Tensor]] = {
    "poly_nl": poly_nl,
    "non_local": non_local,
    "efficient": efficient,
    "tesa": tesa,
    "tesa_channels": tesa_channels,
    "cube": lambda x: x**3,
    "cube, written with cancelling lower orders": lambda x: (x + 1) ** 3 - 3 * x**2 - 3 * x - 1,
    "zero": torch.zeros_like,
}

NOT_CUBIC: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda x: softmax_attention_reference(x, x, x @ W3, scale=1.0),
    "embedded gaussian": lambda x: softmax_attention_reference(x @ W1, x @ W2, x @ W3, scale=C**-0.5),
    "concatenation": lambda x: concatenation_attention_reference(x @ W1, x @ W2, x @ W3, W_PAIR),
    "efficient, softmax": lambda x: efficient_attention_reference(x @ W1, x @ W2, x @ W3, 2, "softmax"),
    "ccp of order 3": lambda x: ccp_reference(x, [W1, W2, W3], W1),
    "constant": torch.ones_like,
    "identity": lambda x: x,
    "residual poly_nl": lambda x: x + poly_nl(x),
    "small residual": lambda x: 1e-6 * x + poly_nl(x),
    "quadratic term": lambda x: 1e-6 * x**2 + poly_nl(x),
    "constant term": lambda x: 1e-6 + poly_nl(x),
    "order 4": lambda x: x**4,
    "order 4 term": lambda x: 1e-6 * x**4 + poly_nl(x),
    "order 5": lambda x: x**5,
    "saturating": lambda x: x.clamp(-20, 20) ** 3,
    "kinked": lambda x: x.relu() * x * x,
    "not finite": lambda x: poly_nl(x) / 0,
}


def symmetrized(w3: Tensor) -> Tensor:
    axes = ((2, 3), (4, 5), (6, 7))
    orders = [w3.permute(0, 1, *p, *q, *r) for p, q, r in permutations(axes)]
    return torch.stack(orders).mean(dim=0)


def paper_triplets(n: int, c: int) -> frozenset[polynomial.Triplet]:
    """{x(a,d) x(e,f) x(e,h)} for each y(a,b), as Eq. 7 and Eq. 8 list them."""
    found = set()
    for a, e in product(range(n), repeat=2):
        for b, d, f, h in product(range(c), repeat=4):
            first, second, third = sorted([(a, d), (e, f), (e, h)])
            found.add(((a, b), (first, second, third)))
    return frozenset(found)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_double_dot_sums_over_the_last_two_axes() -> None:
    w, x = randn(3, 2, 5, 4), randn(5, 4, seed=1)
    expected = torch.zeros(3, 2, dtype=torch.float64)
    for i, j in product(range(5), range(4)):
        expected += w[..., i, j] * x[i, j]
    assert_close(polynomial.double_dot(w, x), expected)


@pytest.mark.parametrize(("n", "c"), [(1, 1), (3, 2), (2, 3)])
def test_third_order_term_of_the_polynomial(n: int, c: int) -> None:
    x, w3 = randn(n, c), randn(*(n, c) * 4, seed=1)
    expected = torch.zeros(n, c, dtype=torch.float64)
    for i, j, k in product(product(range(n), range(c)), repeat=3):
        expected += w3[(..., *i, *j, *k)] * x[i] * x[j] * x[k]
    assert_close(polynomial.polynomial(x, [None, None, None, w3]), expected)
    assert_close(third_order(x, w3), expected)
    assert_close(third_order_elementwise(x, w3), expected)


@pytest.mark.parametrize("absent", [(), (0,), (1, 2), (4,), (0, 1, 2, 3, 4)])
def test_polynomial_is_the_sum_of_its_orders(absent: tuple[int, ...]) -> None:
    x = randn(1, 2)
    weights = [None if d in absent else randn(*(1, 2) * (d + 1), seed=d) for d in range(5)]
    expected = torch.zeros_like(x)
    for order, weight in enumerate(weights):
        if weight is not None:
            term = weight
            for _ in range(order):
                term = (term * x).sum(dim=(-2, -1))
            expected = expected + term
    assert_close(polynomial.polynomial(x, weights), expected)


def test_polynomial_differentiates() -> None:
    weights = [randn(*(2, 1) * (d + 1), seed=d).requires_grad_() for d in range(4)]
    x = randn(2, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *ws: polynomial.polynomial(x, ws), (x, *weights))


def test_polynomial_refuses_bad_weights() -> None:
    with pytest.raises(ValueError, match=r"weights\[1\] has shape \(2, 3, 3, 2\): expected \(2, 3, 2, 3\)"):
        polynomial.polynomial(torch.ones(2, 3), [None, torch.ones(2, 3, 3, 2)])
    with pytest.raises(ValueError, match="weights is empty: expected"):
        polynomial.polynomial(torch.ones(2, 3), [])


def test_recovered_tensor_is_the_symmetric_part_of_any_tensor() -> None:
    w3 = randn(*(2, 3) * 4)
    recovered = third_order_tensor(lambda x: third_order(x, w3), 2, 3)
    assert_close(recovered, symmetrized(w3))
    assert_close(recovered, symmetrized(recovered))


def test_tensor_of_poly_nl_is_what_equation_7_says() -> None:
    expected = torch.zeros((N, C) * 4, dtype=torch.float64)
    for a, e in product(range(N), repeat=2):
        for b, d, f, h in product(range(C), repeat=4):
            expected[a, b, a, d, e, f, e, h] += W1[h, d] * W2[f, d] * W3[d, b] / N
    assert_close(third_order_tensor(poly_nl, N, C), symmetrized(expected))


def test_tensor_of_non_local_is_what_equation_8_says() -> None:
    w_f, w_g = W1 @ W2.T, W3
    expected = torch.zeros((N, C) * 4, dtype=torch.float64)
    for a, e in product(range(N), repeat=2):
        for b, d, f, h in product(range(C), repeat=4):
            expected[a, b, a, d, e, f, e, h] += w_f[d, f] * w_g[h, b]
    assert_close(third_order_tensor(non_local, N, C), symmetrized(expected))


@pytest.mark.parametrize("name", CUBIC)
def test_special_cases_of_the_third_order_term(name: str) -> None:
    f, x = CUBIC[name], randn(N, C, seed=7)
    assert_close(third_order(x, third_order_tensor(f, N, C)), f(x))
    # The cancelling one loses to rounding what it adds and subtracts: 1e-16 · 32³ at the smallest scale.
    assert third_order_residual(f, N, C) < (1e-10 if "cancelling" in name else 1e-12)
    assert is_third_order(f, N, C)


@pytest.mark.parametrize("name", NOT_CUBIC)
def test_what_is_no_special_case(name: str) -> None:
    assert third_order_residual(NOT_CUBIC[name], N, C) > 1e-6
    assert not is_third_order(NOT_CUBIC[name], N, C)


def test_a_kink_through_zero_shows_whichever_way_it_runs() -> None:
    for normal in randn(64, N, C, seed=3):

        def kinked(x: Tensor, normal: Tensor = normal) -> Tensor:
            return (x * normal).sum().relu() * x * x

        assert not is_third_order(kinked, N, C)


def test_tolerance_decides() -> None:
    def nearly_cubic(x: Tensor) -> Tensor:
        return x**3 * (1 + 1e-6 * x)

    assert not is_third_order(nearly_cubic, N, C)
    assert is_third_order(nearly_cubic, N, C, tolerance=1e-3)


def test_the_check_leaves_the_global_generator_and_gradients_alone() -> None:
    w = W1.clone().requires_grad_()
    state = torch.get_rng_state()
    w3 = third_order_tensor(lambda x: poly_nl_reference(x, w, W2, W3), N, C)
    assert torch.equal(torch.get_rng_state(), state)
    assert not w3.requires_grad


def test_poly_nl_and_non_local_use_the_same_triplets() -> None:
    expected = paper_triplets(N, C)
    assert triplets(third_order_tensor(poly_nl, N, C)) == expected
    assert triplets(third_order_tensor(non_local, N, C)) == expected
    assert triplets(third_order_tensor(efficient, N, C)) == expected


def test_tesa_uses_more_triplets_and_its_channel_mode_fewer() -> None:
    """Its spatial modes multiply elements of three positions; the bare channel mode has no weights."""
    assert triplets(third_order_tensor(tesa, N, C)) > paper_triplets(N, C)
    assert triplets(third_order_tensor(tesa_channels, N, C)) < paper_triplets(N, C)


def test_identity_matrices_leave_poly_nl_few_triplets() -> None:
    eye = torch.eye(C)
    used = triplets(third_order_tensor(lambda x: poly_nl_reference(x, eye, eye, eye), N, C))
    expected = set()
    for a, e, b in product(range(N), range(N), range(C)):
        first, second, third = sorted([(a, b), (e, b), (e, b)])
        expected.add(((a, b), (first, second, third)))
    assert used == expected


def test_triplets_have_no_order() -> None:
    w3 = torch.zeros(*(1, 2) * 4)
    w3[0, 0, 0, 1, 0, 0, 0, 1] = 1.0
    assert triplets(w3) == {((0, 0), ((0, 0), (0, 1), (0, 1)))}
    w3[0, 0, 0, 1, 0, 1, 0, 0] = -1.0
    assert triplets(w3) == frozenset()


def test_triplets_ignore_rounding_but_not_small_weights() -> None:
    w3 = torch.zeros(*(1, 2) * 4, dtype=torch.float64)
    w3[0, 0, 0, 0, 0, 0, 0, 0] = 1e3
    w3[0, 1, 0, 0, 0, 0, 0, 0] = 1e-6
    w3[0, 1, 0, 1, 0, 1, 0, 1] = 1e-13
    large, small = ((0, 0), ((0, 0),) * 3), ((0, 1), ((0, 0),) * 3)
    assert triplets(w3) == {large, small}
    assert triplets(w3, tolerance=1e-6) == {large}
    assert len(triplets(w3, tolerance=0.0)) == 3


def test_dense_parameters_of_the_paper() -> None:
    assert polynomial.dense_parameters(1024, 196, 3) == (1024 * 196) ** 4
    assert round(math.log10(polynomial.dense_parameters(1024, 196, 3))) == 21
    assert polynomial.dense_parameters(2, 3, 0) == 6
    assert polynomial.dense_parameters(2, 3, 3) == third_order_tensor(lambda x: x**3, 2, 3).numel()


@pytest.mark.parametrize(
    ("n", "c", "order", "name"), [(0, 1, 3, "n=0"), (1, -1, 3, "c=-1"), (1, 1, -1, "order=-1")]
)
def test_dense_parameters_refuses(n: int, c: int, order: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected an integer"):
        polynomial.dense_parameters(n, c, order)


@pytest.mark.parametrize(
    ("f", "n", "c", "message"),
    [
        (lambda x: x, 0, 2, "n=0: expected an integer"),
        (lambda x: x, 196, 1024, r"n=196, c=1024: W\[3\] would have 1.6e\+21 entries; expected n·c ≤ 64"),
        (lambda x: x[:1], 2, 3, r"f returned shape \(1, 3\): expected \(2, 3\)"),
        (lambda x: x.float() ** 3, 2, 3, "f returned torch.float32: expected torch.float64"),
    ],
)
def test_third_order_tensor_refuses(f: Callable[[Tensor], Tensor], n: int, c: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        third_order_tensor(f, n, c)


def test_ccp_refuses_no_factors() -> None:
    with pytest.raises(ValueError, match="us is empty: expected"):
        polynomial.ccp(torch.ones(1, 2, 3), [], torch.ones(3, 4))
