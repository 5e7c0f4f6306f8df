"""Blocks from the state dicts of peers, against the peers: mmcv and timm themselves, oracles of the rest."""

import copy
import itertools

import pytest
import torch
from peer_oracles import (
    AlexHexOracle,
    EfficientAttentionOracle,
    HydraOracle,
    LatentGNNOracle,
    OfTokens,
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

SIZES = {1: (7,), 2: (5, 7), 3: (3, 5, 7)}
MODES = ("embedded_gaussian", "dot_product", "gaussian", "concatenation")


def maps(channels, spatial):
    return torch.randn(2, channels, *spatial, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def close(actual, expected):
    torch.testing.assert_close(
        actual, expected, rtol=1e-12, atol=1e-12 * max(1.0, expected.abs().max().item())
    )


def assert_equal_to_peer(peer, source, x, *, gradients=True, **options):
    """Outputs, and gradients of input and parameters, in both modes; running statistics after training."""
    block = load_peer(peer.state_dict(), source, **options)
    assert block.training
    for training in (False, True):
        peer.train(training)
        block.train(training)
        theirs, ours = (x.clone().requires_grad_(gradients) for _ in range(2))
        z, expected = block(ours), peer(theirs)
        assert (expected - x).abs().max() > 1e-3
        close(z, expected)
        if gradients:
            cotangent = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(2))
            peer.zero_grad()
            block.zero_grad()
            expected.backward(cotangent)
            z.backward(cotangent)
            close(ours.grad, theirs.grad)
            # Gradients have the names and shapes of parameters, so that they translate as weights do.
            grads = {name: parameter.grad for name, parameter in peer.named_parameters()}
            translated = load_peer(peer.state_dict() | grads, source, **options)
            for (name, parameter), wanted in zip(
                block.named_parameters(), translated.parameters(), strict=True
            ):
                assert parameter.grad is not None, name
                close(parameter.grad, wanted.detach())
    for (name, buffer), wanted in zip(
        block.named_buffers(), load_peer(peer.state_dict(), source, **options).buffers(), strict=True
    ):
        assert torch.allclose(buffer, wanted, rtol=1e-12), name
    return block


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("norm", [None, "BN"])
@pytest.mark.parametrize("use_scale", [False, True])
def test_mmcv(axes, mode, sub_sample, norm, use_scale):
    cnn = pytest.importorskip("mmcv.cnn")
    norm_cfg = None if norm is None else {"type": f"{norm}{axes}d"}
    peer = {1: cnn.bricks.NonLocal1d, 2: cnn.bricks.NonLocal2d, 3: cnn.bricks.NonLocal3d}[axes](
        6, reduction=2, use_scale=use_scale, norm_cfg=norm_cfg, mode=mode, sub_sample=sub_sample
    )
    # mmcv divides the ReLU's result in place, so that its concatenation has no backward.
    gradients = mode != "concatenation"
    options = {"mode": mode, "sub_sample": sub_sample, "use_scale": use_scale}
    x = maps(6, SIZES[axes])
    block = assert_equal_to_peer(randomised(peer), "mmcv", x, gradients=gradients, **options)
    assert (block.out.bias is None) == (norm is not None)


@pytest.mark.parametrize("use_scale", [False, True])
@pytest.mark.parametrize("rd_channels", [None, 3])
def test_timm(use_scale, rd_channels):
    layers = pytest.importorskip("timm.layers")
    peer = layers.NonLocalAttn(12, use_scale=use_scale, rd_channels=rd_channels)
    block = assert_equal_to_peer(randomised(peer), "timm", maps(12, (5, 7)), use_scale=use_scale)
    assert block.inner_channels == peer.t.out_channels


@pytest.mark.parametrize(
    ("layers", "options"),
    [({}, {}), ({"act_layer": nn.SiLU, "gate_layer": "hard_sigmoid", "rd_channels": 5}, None)],
)
def test_timm_se(layers, options):
    timm = pytest.importorskip("timm.layers")
    options = {"act_layer": "silu", "gate_layer": "hard_sigmoid"} if options is None else options
    peer = timm.SqueezeExcite(12, **layers)
    block = assert_equal_to_peer(randomised(peer), "timm_se", maps(12, (5, 7)), **options)
    assert block.inner_channels == peer.fc1.out_channels


def test_timm_se_of_efficientnets():
    blocks = pytest.importorskip("timm.models._efficientnet_blocks")
    peer = blocks.SqueezeExcite(12, act_layer=nn.SiLU)
    block = assert_equal_to_peer(randomised(peer), "timm_se", maps(12, (5, 7)), act_layer="silu")
    assert block.inner_channels == peer.conv_reduce.out_channels


def test_torchvision_se():
    ops = pytest.importorskip("torchvision.ops")
    assert_equal_to_peer(randomised(ops.SqueezeExcitation(6, 3)), "timm_se", maps(6, (5, 7)))


@pytest.mark.parametrize(
    "layers", [{}, {"fuse_add": True, "fuse_scale": False}, {"fuse_add": True, "use_attn": False}]
)
def test_timm_global_context(layers):
    timm = pytest.importorskip("timm.layers")
    peer = timm.GlobalContext(12, rd_channels=5, **layers)
    assert_equal_to_peer(randomised(peer), "timm_global_context", maps(12, (5, 7)))


def test_timm_grn():
    timm = pytest.importorskip("timm.layers.grn")
    peer = timm.GlobalResponseNorm(6, channels_last=False)
    assert_equal_to_peer(randomised(peer), "timm_grn", maps(6, (5, 7)))


@pytest.mark.parametrize(("num_heads", "qkv_bias", "side"), [(1, False, 7), (2, True, 7), (4, False, 12)])
def test_timm_xca(num_heads, qkv_bias, side):
    xcit = pytest.importorskip("timm.models.xcit")
    peer = OfTokens(xcit.XCA(8, num_heads=num_heads, qkv_bias=qkv_bias))
    block = assert_equal_to_peer(randomised(peer), "timm_xca", maps(8, (5, side)), prefix="module")
    assert block.heads == num_heads


@pytest.mark.parametrize("dim", [8, 4])
def test_timm_lite_mla(dim, monkeypatch):
    efficientvit = pytest.importorskip("timm.models.efficientvit_mit")
    peer = randomised(efficientvit.LiteMLA(16, 16, dim=dim, scales=()))
    # It casts to fp32 inside, whatever it is given.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    block = assert_equal_to_peer(peer, "timm_lite_mla", maps(16, (5, 7)), dim=dim)
    assert block.heads == 16 // dim


def test_timm_lite_mla_with_convolutions_at_several_scales_is_refused():
    efficientvit = pytest.importorskip("timm.models.efficientvit_mit")
    state = efficientvit.LiteMLA(16, 16, scales=(5,)).state_dict()
    with pytest.raises(ValueError, match=r"unexpected aggreg\.0\.0\.weight|has shape"):
        load_peer(state, "timm_lite_mla")


@pytest.mark.parametrize("bias", [False, True])
def test_timm_linear_self_attention(bias):
    mobilevit = pytest.importorskip("timm.models.mobilevit")
    peer = mobilevit.LinearSelfAttention(6, bias=bias)
    # Patches of one pixel, which is its next-to-last axis.
    assert_equal_to_peer(randomised(peer), "timm_linear_self_attention", maps(6, (1, 35)))


def test_hydra():
    assert_equal_to_peer(randomised(OfTokens(HydraOracle(6))), "hydra", maps(6, (5, 7)), prefix="module")


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("bn_layer", [False, True])
def test_non_local_pytorch(axes, mode, sub_sample, bn_layer):
    peer = AlexHexOracle(5, 3, axes, mode=mode, sub_sample=sub_sample, bn_layer=bn_layer)
    options = {"mode": mode, "sub_sample": sub_sample}
    assert_equal_to_peer(randomised(peer), "non_local_pytorch", maps(5, SIZES[axes]), **options)


@pytest.mark.parametrize("instantiation", ["softmax", "dot_product"])
@pytest.mark.parametrize("pool_size", [None, [1, 1, 1], [1, 2, 2], [2, 3, 1]])
@pytest.mark.parametrize("norm_type", ["batchnorm", "layernorm", "none"])
def test_slowfast(instantiation, pool_size, norm_type):
    options = {"instantiation": instantiation, "pool_size": pool_size, "norm_type": norm_type}
    peer = randomised(SlowFastOracle(5, 3, **options))
    assert_equal_to_peer(peer, "slowfast", maps(5, SIZES[3]), **options)


def test_slowfast_reads_either_name_of_the_norm():
    new, old = (randomised(SlowFastOracle(4, 2, name=name)) for name in ("norm", "bn"))
    assert "bn.running_var" in old.state_dict()
    assert_equal_to_peer(new, "slowfast", maps(4, SIZES[3]))
    assert_equal_to_peer(old, "slowfast", maps(4, SIZES[3]))


def test_slowfast_takes_no_norm_for_none():
    peer = randomised(SlowFastOracle(4, 2, norm_type="none"))
    assert assert_equal_to_peer(peer, "slowfast", maps(4, SIZES[3])).norm == "none"


@pytest.mark.parametrize("head_count", [1, 2, 4])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_efficient_attention(head_count, axes):
    peer = randomised(EfficientAttentionOracle(6, 8, head_count, 4, axes))
    block = assert_equal_to_peer(peer, "efficient_attention", maps(6, SIZES[axes]), head_count=head_count)
    assert (block.heads, block.key_channels, block.value_channels) == (head_count, 8, 4)


@pytest.mark.parametrize("mode", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("latent_dims", [[4], [5, 2, 3]])
@pytest.mark.parametrize("graph_conv", [False, True])
def test_latentgnn(mode, latent_dims, graph_conv):
    peer = randomised(LatentGNNOracle(8, latent_dims, 3, mode=mode, graph_conv=graph_conv))
    block = assert_equal_to_peer(peer, "latentgnn", maps(8, (5, 7)), mode=mode)
    assert (block.latent_dims, block.inner_channels) == (tuple(latent_dims), 3)


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
