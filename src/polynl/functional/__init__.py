"""The formulas as pure functions on (b, n, c) tensors; modules hold the parameters and call them."""

from polynl.functional.efficient import (
    attend_by_head,
    efficient_attention,
    softmax_sums_by_head,
    sums_by_head,
)
from polynl.functional.gates import gated, position_sum, response
from polynl.functional.gram import gram, mix, mix_by_gram, outer_sum, project
from polynl.functional.latent_gnn import latent_attend, latent_gnn, latent_sums, unit_length
from polynl.functional.non_local import (
    concatenation_attention,
    dot_product_attention,
    dot_product_mixing,
    softmax_attention,
)
from polynl.functional.poly_nl import poly_nl, poly_nl_attend, poly_nl_branch, poly_nl_sum, preferred_form
from polynl.functional.poly_sa import poly_sa
from polynl.functional.polynomial import ccp
from polynl.functional.products import hydra_attend, hydra_sum, separable_attend
from polynl.functional.relu_linear import relu_linear_attend, relu_linear_sums
from polynl.functional.summary import KeysAndValues, SoftmaxSummary, Summary
from polynl.functional.tesa import tesa_mode
from polynl.functional.window import windowed_mean
from polynl.functional.xca import channel_attention, xca_mixing, xca_sums

__all__ = [
    "KeysAndValues",
    "SoftmaxSummary",
    "Summary",
    "attend_by_head",
    "ccp",
    "channel_attention",
    "concatenation_attention",
    "dot_product_attention",
    "dot_product_mixing",
    "efficient_attention",
    "gated",
    "gram",
    "hydra_attend",
    "hydra_sum",
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
    "poly_sa",
    "position_sum",
    "preferred_form",
    "project",
    "relu_linear_attend",
    "relu_linear_sums",
    "response",
    "separable_attend",
    "softmax_attention",
    "softmax_sums_by_head",
    "sums_by_head",
    "tesa_mode",
    "unit_length",
    "windowed_mean",
    "xca_mixing",
    "xca_sums",
]
