"""The shapes in the signatures are true: checked at run time here, and free in production."""

import inspect
from collections.abc import Callable

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped
from torch import Tensor

from polynl import functional

B, N, M, C, D = 2, 7, 5, 6, 4


def t(*shape: int) -> Tensor:
    return torch.randn(shape)


EXAMPLES = {
    "ccp": (t(B, N, C), [t(D, C), t(D, C)], t(C, D), t(C)),
    "concatenation_attention": (t(B, N, D), t(B, M, D), t(B, M, C), t(2 * D)),
    "dot_product_attention": (t(B, N, D), t(B, M, D), t(B, M, C)),
    "dot_product_mixing": (t(B, C, C), t(C, D), t(C, D), t(C, D), t(D, C)),
    "efficient_attention": (t(B, N, D), t(B, N, D), t(B, N, C), 2),
    "gram": (t(B, N, C), t(B, N, D)),
    "latent_gnn": (t(B, N, C), t(B, N, D), t(B, N, D)),
    "mix": (t(B, N, C), t(B, C, D)),
    "mix_by_gram": (t(B, N, C), lambda g: g, 1.0, t()),
    "preferred_form": (t(B, N, C), D, True),
    "poly_nl": (t(B, N, C), t(C, D), t(C, D), t(D, C), t(), t(), t(C, D), "gram"),
    "poly_nl_mixing": (t(B, C, C), t(C, C), t(C, C), t(C, C)),
    "project": (t(B, N, C), t(C, D), t(D)),
    "softmax_attention": (t(B, N, D), t(B, M, D), t(B, M, C), 0.5),
    "tesa_mode": (t(B, C, 3, 4), t(B, C, 3, 4), t(B, C, 3, 4), 2),
    "unit_length": (t(B, N, C), -1),
}
tensor_functions = [
    name
    for name in functional.__all__
    if any(
        "Tensor" in str(p.annotation)
        for p in inspect.signature(getattr(functional, name)).parameters.values()
    )
]


def checked(name: str) -> Callable[..., object]:
    return jaxtyped(typechecker=beartype)(getattr(functional, name))


@pytest.mark.parametrize("name", tensor_functions)
def test_signature_holds(name: str) -> None:
    checked(name)(*EXAMPLES[name])


@pytest.mark.parametrize("name", tensor_functions)
def test_signature_refuses_another_dtype(name: str) -> None:
    x, *rest = EXAMPLES[name]
    with pytest.raises(TypeCheckError):
        checked(name)(x.long(), *rest)
