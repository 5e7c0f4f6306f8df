"""Bad options fail at construction, bad input at once; errors name what was given and what was expected."""

import numpy as np
import pytest
import torch
from torch import nn

import polynl

BAD_OPTIONS = [
    ("poly_nl", {"channels": 0}, r"channels=0: expected a whole number above 0"),
    ("poly_nl", {"channels": -3}, r"channels=-3: expected a whole number above 0"),
    ("poly_nl", {"channels": 2.0}, r"channels=2\.0: expected a whole number above 0"),
    ("poly_nl", {"channels": True}, r"channels=True"),
    ("poly_nl", {"channels": "8"}, r"channels='8': expected a whole number above 0"),
    ("poly_nl", {"reduction": 3}, r"reduction=3: expected a divisor of channels=8"),
    ("poly_nl", {"reduction": 0}, r"reduction=0: expected a whole number above 0"),
    ("poly_nl", {"form": "fast"}, r"form='fast': expected one of 'auto', 'direct', 'gram'"),
    ("poly_nl", {"init": "zeros"}, r"init='zeros': expected one of 'identity', 'random'"),
    ("non_local", {"mode": "softmax"}, r"mode='softmax': expected one of 'dot_product', 'embedded_gaussian'"),
    ("non_local", {"form": "direct"}, r"form='direct': expected one of 'gram', 'quadratic'"),
    ("non_local", {"mode": "gaussian", "form": "gram"}, r"form='gram': expected None, since mode='gaussian'"),
    ("non_local", {"inner_channels": 0}, r"inner_channels=0"),
    ("non_local", {"scale": "sqrt"}, r"scale='sqrt': expected one of 'none', 'inner', 'channels'"),
    ("non_local", {"mode": "concatenation", "scale": "inner"}, r"scale='inner': expected one of 'none'"),
    ("non_local", {"sub_sample": True}, r"sub_sample=True: expected one of None, 'before', 'after'"),
    ("non_local", {"pool_size": 0}, r"pool_size=0"),
    ("non_local", {"pool_size": (1, 2, 2, 2)}, r"pool_size=\(1, 2, 2, 2\): expected a whole number, or one"),
    ("non_local", {"pool_size": 2.5}, r"pool_size=2\.5: expected a whole number, or one"),
    ("non_local", {"bias": "no"}, r"bias='no': expected one of True, False"),
    ("non_local", {"out_bias": 0}, r"out_bias=0: expected one of True, False"),
    ("non_local", {"norm": "bn"}, r"norm='bn': expected one of 'none', 'batch', 'layer'"),
    ("efficient_nl", {"heads": 3}, r"heads=3: expected a divisor of key_channels=4"),
    ("efficient_nl", {"heads": 4, "value_channels": 6}, r"heads=4: expected a divisor of value_channels=6"),
    ("efficient_nl", {"normalization": None}, r"normalization=None: expected one of 'softmax', 'none'"),
    (
        "latent_gnn",
        {"latent_dims": ()},
        r"latent_dims=\(\): expected the number of latent nodes of one kernel, or of each",
    ),
    ("latent_gnn", {"latent_dims": 3.5}, r"latent_dims=3\.5: expected the number of latent nodes"),
    ("latent_gnn", {"latent_dims": "10"}, r"latent_dims='10': expected the number of latent nodes"),
    ("latent_gnn", {"graph_conv": 1}, r"graph_conv=1: expected one of True, False"),
    ("latent_gnn", {"latent_dims": (5, 0)}, r"latent_dims=0"),
    ("latent_gnn", {"mode": "symmetrical"}, r"mode='symmetrical': expected one of 'asymmetric', 'symmetric'"),
    ("tesa", {"order": "slow"}, r"order='slow': expected one of 'cheap', 'quadratic'"),
    ("tesa", {"spatial_axes": 4}, r"spatial_axes=4: expected one of 1, 2, 3"),
    ("conv", {"kernel_size": 1.0}, r"kernel_size=1\.0: expected one of 1, 3"),
    ("conv", {"kernel_size": True}, r"kernel_size=True: expected one of 1, 3"),
    ("conv", {"kernel_size": 5}, r"kernel_size=5: expected one of 1, 3"),
    ("polynomial", {"order": 0}, r"order=0"),
    ("xca", {"heads": 3}, r"heads=3: expected a divisor of channels=8"),
    ("xca", {"residual": False}, r"residual=False: expected True with init='identity', .*use init='random'"),
    ("hydra", {"residual": 1, "init": "random"}, r"residual=1: expected one of True, False"),
    ("hydra", {"normalization": "softmax"}, r"normalization='softmax': expected one of 'cosine', 'none'"),
    ("relu_linear", {"heads": 3}, r"heads=3: expected a divisor of inner_channels=8"),
    ("se", {"gate": "sigmoid"}, r"gate='sigmoid': expected 'doubled' with init='identity'.*init='random'"),
    ("se", {"gate": "tanh"}, r"gate='tanh': expected one of 'doubled', 'sigmoid', 'hard_sigmoid'"),
    ("se", {"activation": "gelu"}, r"activation='gelu': expected one of 'relu', 'silu'"),
    ("global_context", {"fusion": "mul"}, r"fusion='mul': expected one of 'add', 'scale', 'both'"),
    ("global_context", {"pooling": "max"}, r"pooling='max': expected one of 'softmax', 'mean'"),
    ("polynomial", {"rank": 4}, r"rank=4: expected at least channels=8 to start as the identity"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD_OPTIONS)
def test_bad_option(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        polynl.build_block(name, **{"channels": 8, **options})


def test_unknown_block_lists_the_blocks() -> None:
    with pytest.raises(ValueError, match=r"there is no block 'polynl'\. Did you mean poly_nl.*latent_gnn"):
        polynl.build_block("polynl", 8)


@pytest.mark.parametrize("name", [64, None, polynl.PolyNL])
def test_a_name_that_is_none(name: object) -> None:
    with pytest.raises(ValueError, match=r"there is no block .*The blocks are non_local, tesa"):
        polynl.build_block(name, 8)


def test_numpy_integers_are_whole_numbers() -> None:
    block = polynl.LatentGNN(np.int64(8), latent_dims=np.int32(5))
    assert (block.channels, block.latent_dims) == (8, (5,))
    assert type(block.channels) is int


def test_mistyped_option_names_the_near_one() -> None:
    with pytest.raises(TypeError, match=r"no option 'reducton' \(given as 4\)\. Did you mean reduction"):
        polynl.build_block("poly_nl", 8, reducton=4)


@pytest.mark.parametrize("block", [row.block for row in polynl.BLOCKS.values()])
def test_no_argument_is_swallowed(block: type) -> None:
    with pytest.raises(TypeError, match="sub_samples"):
        block(8, sub_samples=True)
    with pytest.raises(TypeError, match="positional"):
        block(8, "identity")


@pytest.mark.parametrize("name", polynl.BLOCKS)
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(8, 5, 4), ValueError, r"x has shape \(8, 5, 4\); .*; add a batch axis with x\[None\]"),
        (torch.zeros(8, 2, 5, 4), ValueError, r"x has shape \(8, 2, 5, 4\); .*; add a batch axis"),
        (torch.zeros(2, 8, 0, 4), ValueError, r"x has shape \(2, 8, 0, 4\), which has no positions"),
        (
            torch.zeros(2, 8, 5, 4).half(),
            TypeError,
            r"dtype torch.float16; expected torch.float32, the dtype of",
        ),
        (
            torch.zeros(8, 5),
            ValueError,
            r"x has shape \(8, 5\); expected a batch of maps \(b, 8, \*spatial\)",
        ),
        (
            torch.zeros(2, 7, 5, 4),
            ValueError,
            r"\(2, 7, 5, 4\); expected a batch of maps \(b, 8, \*spatial\)",
        ),
        (torch.zeros(1, 8, 2, 2, 2, 2), ValueError, r"with 1 to 3 spatial axes"),
        (
            torch.zeros(2, 8, 5, 4, dtype=torch.int64),
            TypeError,
            r"dtype torch.int64; expected a floating-point",
        ),
        (torch.zeros(2, 8, 5, 4, dtype=torch.complex64), TypeError, r"dtype torch.complex64"),
    ],
    ids=["unbatched", "unbatched 3-d", "empty", "half", "matrix", "channels", "axes", "integer", "complex"],
)
def test_bad_input(name: str, x: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        polynl.build_block(name, 8)(x)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            polynl.NonLocal(8, sub_sample="after", pool_size=(1, 2, 2)),
            r"x has 2 spatial axes; pool_size=\(1, 2, 2\)",
        ),
        (polynl.TESA(8, fusion="concat", spatial_axes=3), r"construct it with spatial_axes=2"),
        (polynl.ConvBaseline(8, kernel_size=3, spatial_axes=1), r"construct it with spatial_axes=2"),
    ],
)
def test_input_of_another_rank(block: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block(torch.zeros(1, 8, 4, 4))
