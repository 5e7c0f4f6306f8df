"""How state dicts of peers are read: what is copied, checked and refused."""

import copy
import itertools

import pytest
import torch
from peer_oracles import (
    MODES,
    AlexHexOracle,
    EfficientAttentionOracle,
    HydraOracle,
    LatentGNNOracle,
    SlowFastOracle,
    randomised,
)
from torch import nn

from polynl import (
    XCA,
    GlobalContext,
    GlobalResponseNorm,
    HydraAttention,
    ReLULinearAttention,
    SeparableAttention,
    SqueezeExcite,
)
from polynl.blocks import EfficientNL, LatentGNN, NonLocal
from polynl.blocks.peers import SOURCES, load_peer


def example(source):
    """A small peer of `source` as a state dict, and the options that it does not show."""
    modules = {
        "mmcv": lambda: nn.ModuleDict(
            {name: nn.ModuleDict({"conv": nn.Conv2d(4, 2, 1)}) for name in ("theta", "phi", "g")}
            | {"conv_out": nn.ModuleDict({"conv": nn.Conv2d(2, 4, 1, bias=False), "bn": nn.BatchNorm2d(4)})}
        ),
        "timm": lambda: nn.ModuleDict(
            {name: nn.Conv2d(4, 2, 1) for name in "tpg"}
            | {"z": nn.Conv2d(2, 4, 1), "norm": nn.BatchNorm2d(4)}
        ),
        "non_local_pytorch": lambda: AlexHexOracle(4, 2, 2, mode="dot_product", sub_sample=False),
        "slowfast": lambda: SlowFastOracle(4, 2),
        "efficient_attention": lambda: EfficientAttentionOracle(4, 2, 2, 2),
        "latentgnn": lambda: LatentGNNOracle(4, [2], 2),
        "timm_se": lambda: nn.ModuleDict({"fc1": nn.Conv2d(4, 2, 1), "fc2": nn.Conv2d(2, 4, 1)}),
        "timm_global_context": lambda: nn.ModuleDict(
            {"conv_attn": nn.Conv2d(4, 1, 1)}
            | {
                name: nn.ModuleDict(
                    {"fc1": nn.Conv2d(4, 2, 1), "norm": nn.LayerNorm(2), "fc2": nn.Conv2d(2, 4, 1)}
                )
                for name in ("mlp_add", "mlp_scale")
            }
        ),
        "timm_grn": lambda: nn.LayerNorm(4),
        "timm_xca": lambda: nn.ParameterDict({"temperature": torch.ones(2, 1, 1)}),
        "timm_lite_mla": lambda: nn.ModuleDict(
            {
                "qkv": nn.ModuleDict({"conv": nn.Conv2d(4, 6, 1, bias=False)}),
                "proj": nn.ModuleDict({"conv": nn.Conv2d(2, 4, 1, bias=False), "norm": nn.BatchNorm2d(4)}),
            }
        ),
        "timm_linear_self_attention": lambda: nn.ModuleDict(
            {"qkv_proj": nn.Conv2d(4, 5, 1), "out_proj": nn.Conv2d(2, 4, 1)}
        ),
        "hydra": lambda: HydraOracle(4),
    }
    options = {"efficient_attention": {"head_count": 2}, "timm_lite_mla": {"dim": 1}}.get(source, {})
    if source == "timm_xca":
        linear = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False), "proj": nn.Linear(4, 4)})
        return randomised(modules[source]()).state_dict() | randomised(linear).state_dict(), options
    return randomised(modules[source]()).state_dict(), options


every_source = pytest.mark.parametrize("source", SOURCES)
CONVOLVING = [name for name, source in SOURCES.items() if source.convolves]
COUNTING = [name for name in SOURCES if any(key.endswith("tracked") for key in example(name)[0])]


@every_source
def test_holds_copies_and_leaves_the_rest_alone(source):
    state, options = example(source)
    before = copy.deepcopy(state)
    generator = torch.get_rng_state()
    block = load_peer(state, source, **options)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.fill_(9)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[key], before[key]) for key in state)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in block.parameters())
    assert all(parameter.is_contiguous() for parameter in block.parameters())


@every_source
def test_keeps_no_graph(source):
    state, options = example(source)
    live = {key: tensor.requires_grad_(tensor.is_floating_point()) for key, tensor in state.items()}
    for name, tensor in load_peer(live, source, **options).state_dict(keep_vars=True).items():
        assert tensor.is_leaf, name


@every_source
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_keeps_the_dtype(source, dtype):
    state, options = example(source)
    # Whoever converts a dict without looking converts the counters as well.
    block = load_peer({key: tensor.to(dtype) for key, tensor in state.items()}, source, **options)
    for name, tensor in block.state_dict().items():
        assert tensor.dtype == (torch.int64 if name.endswith("num_batches_tracked") else dtype), name
    x = torch.randn(2, 4, 2, 3, 3, dtype=dtype)
    assert block(x if source == "slowfast" else x[:, :, 0]).dtype == dtype


def test_keeps_a_norm_in_fp32_beside_fp16():
    state, _ = example("timm")
    mixed = {
        key: tensor.float() if key.startswith("norm") else tensor.half() for key, tensor in state.items()
    }
    block = load_peer(mixed, "timm")
    assert (block.theta.weight.dtype, block.out.norm.weight.dtype) == (torch.float16, torch.float32)
    assert block(torch.randn(2, 4, 3, 3).half()).dtype == torch.float16


@every_source
@pytest.mark.parametrize("given", ["backbone.layer3.nl.", "backbone.layer3.nl"])
def test_takes_the_peer_out_of_a_network(source, given):
    state, options = example(source)
    network = {"stem.weight": torch.ones(1), "backbone.layer3.nl2.weight": torch.ones(1)}
    network |= {f"backbone.layer3.nl.{key}": tensor for key, tensor in state.items()}
    block, expected = load_peer(network, source, prefix=given, **options), load_peer(state, source, **options)
    assert all(
        torch.equal(a, b)
        for a, b in zip(block.state_dict().values(), expected.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("source", COUNTING)
def test_old_state_dicts_lack_the_counter(source):
    state, options = example(source)
    old = {key: tensor for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
    assert len(old) < len(state)
    old_block, block = load_peer(old, source, **options), load_peer(state, source, **options)
    for name, tensor in old_block.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert (tensor.dtype, tensor.item()) == (torch.int64, 0)
        else:
            assert torch.equal(tensor, block.state_dict()[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sub_sample", [False, True])
def test_reads_mode_and_sub_sampling_from_the_keys(mode, sub_sample):
    peer = AlexHexOracle(4, 2, 3, mode=mode, sub_sample=sub_sample)
    block = load_peer(peer.state_dict(), "non_local_pytorch")
    assert isinstance(block, NonLocal)
    # The keys of these two are the same; the first is what peers default to.
    assert block.mode == ("embedded_gaussian" if mode == "dot_product" else mode)
    assert (block.sub_sample, block.pool_size) == (("after", (1, 2, 2)) if sub_sample else (None, 2))


def test_defaults_are_those_of_the_peers():
    assert load_peer(example("mmcv")[0], "mmcv").scale == "inner"
    assert load_peer(example("timm")[0], "timm").scale == "channels"
    assert load_peer(example("non_local_pytorch")[0], "non_local_pytorch").scale == "none"
    slowfast = load_peer(example("slowfast")[0], "slowfast")
    assert (slowfast.mode, slowfast.scale, slowfast.sub_sample) == ("embedded_gaussian", "inner", None)
    assert load_peer(example("latentgnn")[0], "latentgnn").mode == "asymmetric"


@every_source
def test_makes_the_block_of_its_kind(source):
    kinds = {
        "efficient_attention": EfficientNL,
        "latentgnn": LatentGNN,
        "timm_se": SqueezeExcite,
        "timm_global_context": GlobalContext,
        "timm_grn": GlobalResponseNorm,
        "timm_xca": XCA,
        "timm_lite_mla": ReLULinearAttention,
        "timm_linear_self_attention": SeparableAttention,
        "hydra": HydraAttention,
    }
    state, options = example(source)
    assert type(load_peer(state, source, **options)) is kinds.get(source, NonLocal)


def test_reads_a_fork_without_biases():
    state = {
        key: tensor
        for key, tensor in example("non_local_pytorch")[0].items()
        if "W.1" in key or "bias" not in key
    }
    block = load_peer(state, "non_local_pytorch")
    assert not block.bias
    assert block.out.bias is None


@every_source
def test_every_key_is_needed(source):
    state, options = example(source)
    for key in state:
        if not key.endswith("num_batches_tracked"):
            with pytest.raises(ValueError, match=r"the keys do not match|shape"):
                load_peer({name: tensor for name, tensor in state.items() if name != key}, source, **options)


def test_a_kernel_is_needed():
    state = {key: tensor for key, tensor in example("latentgnn")[0].items() if "Kernel" not in key}
    with pytest.raises(ValueError, match=r"missing LatentGNN_Kernel_0\.psi_v2l\.0\.weight"):
        load_peer(state, "latentgnn")


@every_source
def test_no_key_is_ignored(source):
    state, options = example(source)
    with pytest.raises(
        ValueError, match=rf"source='{source}': the keys do not match: unexpected foo.weight$"
    ):
        load_peer(state | {"foo.weight": torch.ones(1)}, source, **options)


@every_source
def test_every_shape_is_checked(source):
    state, options = example(source)
    for key, tensor in state.items():
        longer = torch.ones(*tensor.shape, 2)
        with pytest.raises(ValueError, match=r"has shape \(.*\); expected"):
            load_peer(state | {key: longer}, source, **options)


@pytest.mark.parametrize("source", CONVOLVING)
def test_a_linear_layer_is_no_convolution(source):
    state, options = example(source)
    linear = {key: tensor[(..., *(0,) * (tensor.dim() - 2))] for key, tensor in state.items()}
    with pytest.raises(
        ValueError, match=r"has shape \(4, 2\); expected the weight of a 1-d, 2-d or 3-d convolution"
    ):
        load_peer(linear, source, **options)


def test_a_convolution_is_neither_transposed_nor_wider_than_one():
    state, _ = example("timm")
    for weight in (torch.ones(4, 2, 1, 1), torch.ones(2, 4, 3, 3), torch.ones(2, 4, 1)):
        with pytest.raises(ValueError, match=r"t\.weight has shape .*; expected \(2, 4, 1, 1\)"):
            load_peer(state | {"t.weight": weight}, "timm")


@pytest.mark.parametrize(("source", "other"), list(itertools.permutations(SOURCES, 2)))
def test_names_the_source_that_the_keys_are_of(source, other):
    state, _ = example(other)
    options = {"head_count": 1} if source == "efficient_attention" else {}
    with pytest.raises(ValueError, match=rf"source='{source}'.* missing .*Did you mean source='{other}'\?"):
        load_peer(state, source, **options)


BAD_OPTIONS = [
    ("mmcv", {"mode": "softmax"}, ValueError, r"mode='softmax': expected one of 'dot_product'"),
    (
        "mmcv",
        {"mode": "gaussian"},
        ValueError,
        r"mode='gaussian': .*mode='embedded_gaussian' or 'dot_product'",
    ),
    ("mmcv", {"sub_sample": True}, ValueError, r"sub_sample=True: the keys belong to sub_sample=False"),
    ("mmcv", {"use_scale": "no"}, ValueError, r"use_scale='no': expected one of True, False"),
    (
        "mmcv",
        {"reduction": 4},
        TypeError,
        r"no option 'reduction' \(given as 4\)\. .* mode, sub_sample, use_scale\.$",
    ),
    ("timm", {"use_scales": True}, TypeError, r"no option 'use_scales' .* Did you mean use_scale\?"),
    ("timm", {"use_scale": None}, ValueError, r"use_scale=None: expected one of True, False"),
    (
        "timm",
        {"mode": "gaussian"},
        TypeError,
        r"'timm' has no option 'mode' .*\. Its options are use_scale\.$",
    ),
    (
        "non_local_pytorch",
        {"mode": "concatenation"},
        ValueError,
        r"mode='concatenation': the keys belong to",
    ),
    ("non_local_pytorch", {"sub_sample": True}, ValueError, r"sub_sample=True: the keys belong to"),
    (
        "slowfast",
        {"instantiation": "gaussian"},
        ValueError,
        r"instantiation='gaussian': expected one of 'softmax'",
    ),
    ("slowfast", {"pool_size": [2, 2]}, ValueError, r"pool_size=\[2, 2\]: .* each of the 3 axes"),
    ("slowfast", {"pool_size": 2}, ValueError, r"pool_size=2: expected None, or"),
    ("slowfast", {"pool_size": [1, 0, 2]}, ValueError, r"pool_size=0: expected a whole number above 0"),
    ("slowfast", {"norm_type": "none"}, ValueError, r"norm_type='none': .*norm_type='batchnorm'"),
    ("slowfast", {"norm_type": "group"}, ValueError, r"norm_type='group': expected one of 'batchnorm'"),
    ("efficient_attention", {}, TypeError, r"'efficient_attention' needs the option 'head_count'"),
    ("efficient_attention", {"head_count": 4}, ValueError, r"head_count=4: .*divisor of key_channels=2"),
    ("efficient_attention", {"head_count": 0}, ValueError, r"head_count=0: expected a whole number above 0"),
    (
        "latentgnn",
        {"mode": "symmetric"},
        ValueError,
        r"mode='symmetric': the keys belong to mode='asymmetric'",
    ),
    ("latentgnn", {"mode": "both"}, ValueError, r"mode='both': expected one of 'asymmetric', 'symmetric'"),
    (
        "latentgnn",
        {"without_residual": True},
        TypeError,
        r"no option 'without_residual' .*Its options are mode\.$",
    ),
]


@pytest.mark.parametrize(("source", "options", "error", "message"), BAD_OPTIONS)
def test_refuses_an_option(source, options, error, message):
    with pytest.raises(error, match=message):
        load_peer(example(source)[0], source, **options)


def test_refuses_options_against_other_keys():
    pooled = AlexHexOracle(4, 2, 2, mode="gaussian").state_dict()
    with pytest.raises(ValueError, match=r"sub_sample=False: the keys belong to sub_sample=True"):
        load_peer(pooled, "non_local_pytorch", sub_sample=False)
    with pytest.raises(ValueError, match=r"mode='dot_product': the keys belong to mode='gaussian'"):
        load_peer(pooled, "non_local_pytorch", mode="dot_product")
    concatenation = AlexHexOracle(4, 2, 2, mode="concatenation").state_dict()
    with pytest.raises(ValueError, match=r"mode='dot_product': the keys belong to mode='concatenation'"):
        load_peer(concatenation, "non_local_pytorch", mode="dot_product")
    symmetric = LatentGNNOracle(4, [2], 2, mode="symmetric").state_dict()
    with pytest.raises(ValueError, match=r"mode='asymmetric': the keys belong to mode='symmetric'"):
        load_peer(symmetric, "latentgnn", mode="asymmetric")
    no_norm = SlowFastOracle(4, 2, norm_type="none").state_dict()
    with pytest.raises(ValueError, match=r"norm_type='batchnorm': .*norm_type='none' or 'layernorm'"):
        load_peer(no_norm, "slowfast", norm_type="batchnorm")
    values = EfficientAttentionOracle(4, 6, 1, 4).state_dict()
    with pytest.raises(ValueError, match=r"head_count=3: expected a divisor of value_channels=4"):
        load_peer(values, "efficient_attention", head_count=3)


def test_refuses_an_unknown_source():
    with pytest.raises(ValueError, match=r"source='mmseg': expected one of 'mmcv', 'timm', .*'latentgnn'"):
        load_peer(example("mmcv")[0], "mmseg")


def test_refuses_a_prefix_that_nothing_has():
    with pytest.raises(
        ValueError, match=r"prefix='head\.': no key starts with it; the keys are t.*and 8 more"
    ):
        load_peer(example("timm")[0], "timm", prefix="head.")
    with pytest.raises(ValueError, match=r"no key starts with it; the keys are none"):
        load_peer({}, "timm")


def test_suggests_the_prefix():
    network = {f"body.nl.{key}": tensor for key, tensor in example("timm")[0].items()}
    with pytest.raises(
        ValueError, match=r"missing z.weight; given body.* and 8 more\. Did you mean prefix='body.nl.'\?"
    ):
        load_peer(network, "timm")
    with pytest.raises(ValueError, match=r"Did you mean prefix='body.nl.'\?"):
        load_peer(network, "timm", prefix="body")


def test_refuses_what_is_no_state_dict():
    state = example("timm")[0]
    with pytest.raises(TypeError, match=r"state_dict is a Conv2d; expected a dict of tensors"):
        load_peer(nn.Conv2d(1, 1, 1), "timm")
    with pytest.raises(TypeError, match=r"state_dict\['state_dict'\] is a .*Dict; expected a tensor"):
        load_peer({"state_dict": state}, "timm")
    with pytest.raises(TypeError, match=r"t.weight has dtype torch.int8; expected a floating-point dtype"):
        load_peer(state | {"t.weight": state["t.weight"].to(torch.int8)}, "timm")
