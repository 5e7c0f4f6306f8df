"""Blocks from the state dicts of peers, against the peers: mmcv and timm themselves, oracles of the rest."""

import pytest
import torch
from peer_oracles import (
    MODES,
    AlexHexOracle,
    EfficientAttentionOracle,
    HydraOracle,
    LatentGNNOracle,
    OfTokens,
    SlowFastOracle,
    randomised,
)
from torch import nn

from polynl.blocks.peers import load_peer

SIZES = {1: (7,), 2: (5, 7), 3: (3, 5, 7)}


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
