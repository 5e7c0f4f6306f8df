"""The formulas as pure functions on (b, n, c) tensors; modules hold the parameters and call them."""

from polynl.functional.efficient import (
    attend_by_head,
    efficient_attention,
    softmax_sums_by_head,
    sums_by_head,
)
from polynl.functional.gram import gram, mix, mix_by_gram, outer_sum, project
from polynl.functional.latent_gnn import latent_attend, latent_gnn, latent_sums, unit_length
from polynl.functional.non_local import (
    concatenation_attention,
    dot_product_attention,
    dot_product_mixing,
    softmax_attention,
)
from polynl.functional.poly_nl import poly_nl, poly_nl_attend, poly_nl_branch, poly_nl_sum, preferred_form
from polynl.functional.polynomial import ccp
from polynl.functional.summary import KeysAndValues, SoftmaxSummary, Summary
from polynl.functional.tesa import tesa_mode

__all__ = [
    "KeysAndValues",
    "SoftmaxSummary",
    "Summary",
    "attend_by_head",
    "ccp",
    "concatenation_attention",
    "dot_product_attention",
    "dot_product_mixing",
    "efficient_attention",
    "gram",
    "latent_attend",
    "latent_gnn",
    "latent_sums",
    "mix",
    "mix_by_gram",
    "outer_sum",
    "poly_nl",
    "poly_nl_attend",
    "poly_nl_branch",
    "poly_nl_sum",
    "preferred_form",
    "project",
    "softmax_attention",
    "softmax_sums_by_head",
    "sums_by_head",
    "tesa_mode",
    "unit_length",
]
