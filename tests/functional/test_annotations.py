"""The shapes in the signatures are true: checked at run time here, and free in production."""

import inspect
from collections.abc import Callable
from typing import get_type_hints

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
    "channel_attention": (t(B, 2, 3, 3), t(B, 2, 3).square(), t(B, 2, 3).square(), t(2, 1, 1)),
    "gated": (t(B, N, C), t(B, 1, C), "doubled"),
    "hydra_attend": (t(B, N, D), t(B, D)),
    "hydra_sum": (t(B, N, D), t(B, N, D), "cosine", t(B, N)),
    "position_sum": (t(B, N, C), t(B, N)),
    "relu_linear_attend": (t(B, N, D), t(B, 2, D // 2), t(B, 2, D // 2, C // 2)),
    "relu_linear_sums": (t(B, N, D), t(B, N, C), 2, t(B, N).square()),
    "response": (t(B, C).square(),),
    "separable_attend": (t(B, N, C), t(B, C)),
    "xca_mixing": (t(B, C, C), t(D, C), t(D, C), t(D, C), t(C, D), t(2, 1, 1)),
    "xca_sums": (t(B, N, D), t(B, N, D), 2, t(B, N).square()),
    "attend_by_head": (t(B, N, D), t(B, 2, D // 2, C // 2), "softmax"),
    "ccp": (t(B, N, C), [t(D, C), t(D, C)], t(C, D), t(C)),
    "concatenation_attention": (t(B, N, D), t(B, M, D), t(B, M, C), t(2 * D), t(B, M)),
    "dot_product_attention": (t(B, N, D), t(B, M, D), t(B, M, C)),
    "dot_product_mixing": (t(B, C, C), t(D, C), t(D, C), t(D, C), t(C, D)),
    "efficient_attention": (t(B, N, D), t(B, N, D), t(B, N, C), 2),
    "gram": (t(B, N, C), t(B, N, D)),
    "latent_gnn": (t(B, N, C), t(B, N, D), t(B, N, D)),
    "latent_sums": (t(B, N, C), t(B, N, D), t(B, N)),
    "latent_attend": (t(B, N, D), t(B, D, C), t(B, D).square()),
    "mix": (t(B, N, C), t(B, C, D)),
    "mix_by_gram": (t(B, N, C), lambda g: g),
    "outer_sum": (t(B, N, C), t(B, N, D)),
    "preferred_form": (t(B, N, C), D, True),
    "poly_nl": (t(B, N, C), t(D, C), t(D, C), t(C, D), t(), t(), t(D, C), "gram"),
    "poly_nl_attend": (t(B, N, C), t(B, D), t(C, D), t(), t(), t(D, C)),
    "poly_nl_branch": (t(B, N, C), t(B, D), t(C, D), t(D, C)),
    "poly_nl_sum": (t(B, N, C), t(D, C), t(D, C), t(B, N)),
    "poly_sa": (t(B, 2, N, D), t(B, 2, N, D), t(B, 2, N, D), t(2, N), t(2, N), t(D), t(D)),
    "project": (t(B, N, C), t(D, C), t(D)),
    "softmax_attention": (t(B, N, D), t(B, M, D), t(B, M, C), 0.5, t(B, M).square()),
    "softmax_sums_by_head": (t(B, N, D), t(B, N, C), 2, t(B, N).square()),
    "sums_by_head": (t(B, N, D), t(B, N, C), 2, t(B, N)),
    "tesa_mode": (t(B, C, 3, 4), t(B, C, 3, 4), t(B, C, 3, 4), 2),
    "unit_length": (t(B, N, C), -1),
    "windowed_mean": (t(B, 6, C), (2, 3), (1, 3), t(B, 6).square()),
}
# Keyword-only arguments, which have no default.
OPTIONS = {"latent_sums": {"symmetric": False}}
tensor_functions = [
    name
    for name in functional.__all__
    if inspect.isfunction(getattr(functional, name))
    and any(
        "Tensor" in str(p.annotation)
        for p in inspect.signature(getattr(functional, name)).parameters.values()
    )
]


def checked(name: str) -> Callable[..., object]:
    return jaxtyped(typechecker=beartype)(getattr(functional, name))


@pytest.mark.parametrize("name", tensor_functions)
def test_signature_holds(name: str) -> None:
    checked(name)(*EXAMPLES[name], **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", tensor_functions)
def test_signature_refuses_another_dtype(name: str) -> None:
    x, *rest = EXAMPLES[name]
    with pytest.raises(TypeCheckError):
        checked(name)(x.long(), *rest, **OPTIONS.get(name, {}))


def test_tensors_of_a_summary_are_of_one_batch() -> None:
    def fields(count, parts) -> None: ...

    hints = get_type_hints(functional.Summary)
    fields.__annotations__ = {name: hints[name] for name in ("count", "parts")}
    check = jaxtyped(typechecker=beartype)(fields)
    check(t(B), {"exponentials": t(B, D), "values": t(B, D, C)})
    for count, part in ((t(B), t(B + 1, D)), (t(B, 1), t(B, D)), (t(B).long(), t(B, D))):
        with pytest.raises(TypeCheckError):
            check(count, {"values": part})
