"""The formulas as pure functions on (b, n, c) tensors; modules hold the parameters and call them."""

from polynl.functional.efficient import efficient_attention
from polynl.functional.gram import gram, mix, mix_by_gram, project
from polynl.functional.latent_gnn import latent_gnn, unit_length
from polynl.functional.non_local import (
    concatenation_attention,
    dot_product_attention,
    dot_product_mixing,
    softmax_attention,
)
from polynl.functional.poly_nl import poly_nl, poly_nl_mixing, preferred_form
from polynl.functional.polynomial import ccp
from polynl.functional.tesa import tesa_mode

__all__ = [
    "ccp",
    "concatenation_attention",
    "dot_product_attention",
    "dot_product_mixing",
    "efficient_attention",
    "gram",
    "latent_gnn",
    "mix",
    "mix_by_gram",
    "poly_nl",
    "poly_nl_mixing",
    "preferred_form",
    "project",
    "softmax_attention",
    "tesa_mode",
    "unit_length",
]
