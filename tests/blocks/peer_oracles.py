"""What the peers that no registry has compute, by their conventions and under their names of parameters."""

import torch
import torch.nn.functional as F
from torch import nn

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MAX_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}

MODES = ("embedded_gaussian", "dot_product", "gaussian", "concatenation")


def randomised(peer):
    """`peer` in fp64, no parameter or buffer left at a value that hides something."""
    generator = torch.Generator().manual_seed(0)
    peer.double()
    with torch.no_grad():
        for name, tensor in peer.state_dict(keep_vars=True).items():
            if name.endswith("num_batches_tracked"):
                tensor.fill_(7)
            elif name.endswith("running_var"):
                tensor.uniform_(0.5, 2, generator=generator)
            else:
                tensor.normal_(generator=generator)
    return peer


class AlexHexOracle(nn.Module):
    """Non-local_pytorch: no scale, max pool after the convolutions φ and g, a norm after W or none."""

    def __init__(self, channels, inner, axes, *, mode, sub_sample=True, bn_layer=True):
        super().__init__()
        self.mode = mode
        conv = CONV[axes]
        pool = MAX_POOL[axes]((1, 2, 2) if axes == 3 else 2)
        pooled = (lambda layer: nn.Sequential(layer, pool)) if sub_sample else (lambda layer: layer)
        self.keys_of_gaussian = pool if sub_sample else nn.Identity()
        self.g = pooled(conv(channels, inner, 1))
        if mode != "gaussian":
            self.theta = conv(channels, inner, 1)
            self.phi = pooled(conv(channels, inner, 1))
        if mode == "concatenation":
            self.concat_project = nn.Sequential(nn.Conv2d(2 * inner, 1, 1, bias=False), nn.ReLU())
        out = conv(inner, channels, 1)
        self.W = nn.Sequential(out, BATCH_NORM[axes](channels)) if bn_layer else out

    def forward(self, x):
        gaussian = self.mode == "gaussian"
        queries = (x if gaussian else self.theta(x)).flatten(2)
        keys = (self.keys_of_gaussian(x) if gaussian else self.phi(x)).flatten(2)
        values = self.g(x).flatten(2)
        n, m = queries.shape[-1], keys.shape[-1]
        if self.mode == "concatenation":
            pairs = torch.cat(
                (queries[..., None].expand(-1, -1, n, m), keys[..., None, :].expand(-1, -1, n, m)), dim=1
            )
            weights = self.concat_project(pairs)[:, 0] / m
        else:
            scores = torch.einsum("bdi,bdj->bij", queries, keys)
            weights = scores / m if self.mode == "dot_product" else scores.softmax(-1)
        y = torch.einsum("bij,bdj->bdi", weights, values)
        return x + self.W(y.unflatten(-1, x.shape[2:]))


class SlowFastOracle(nn.Module):
    """SlowFast: max pool before φ and g, 1/√inner with softmax only; the norm was once called `bn`."""

    def __init__(
        self, dim, dim_inner, *, pool_size=None, instantiation="softmax", norm_type="batchnorm", name="norm"
    ):
        super().__init__()
        self.conv_theta, self.conv_phi, self.conv_g = (nn.Conv3d(dim, dim_inner, 1) for _ in range(3))
        self.conv_out = nn.Conv3d(dim_inner, dim, 1)
        self.pool_size, self.instantiation, self.norm_name = pool_size, instantiation, name
        norms = {
            "batchnorm": lambda: nn.BatchNorm3d(dim),
            "layernorm": lambda: nn.GroupNorm(1, dim, affine=False),
            "none": nn.Identity,
        }
        self.add_module(name, norms[norm_type]())

    def forward(self, x):
        keys = x if self.pool_size is None else F.max_pool3d(x, self.pool_size)
        theta, phi, g = (
            f(m).flatten(2) for f, m in ((self.conv_theta, x), (self.conv_phi, keys), (self.conv_g, keys))
        )
        scores = theta.mT @ phi
        if self.instantiation == "softmax":
            weights = (scores / theta.shape[1] ** 0.5).softmax(-1)
        else:
            weights = scores / phi.shape[-1]
        y = (weights @ g.mT).mT.unflatten(-1, x.shape[2:])
        return x + self.get_submodule(self.norm_name)(self.conv_out(y))


class EfficientAttentionOracle(nn.Module):
    """Efficient attention: channels are head-major; keys sum to 1 over positions, queries in a head."""

    def __init__(self, channels, key_channels, head_count, value_channels, axes=2):
        super().__init__()
        conv = CONV[axes]
        self.keys, self.queries = conv(channels, key_channels, 1), conv(channels, key_channels, 1)
        self.values, self.reprojection = conv(channels, value_channels, 1), conv(value_channels, channels, 1)
        self.head_count = head_count

    def forward(self, x):
        k, q, v = (
            f(x).flatten(2).unflatten(1, (self.head_count, -1))
            for f in (self.keys, self.queries, self.values)
        )
        context = torch.einsum("bhdn,bhen->bhde", k.softmax(3), v)
        y = torch.einsum("bhde,bhdn->bhen", context, q.softmax(2))
        return x + self.reprojection(y.flatten(1, 2).unflatten(-1, x.shape[2:]))


def conv_norm(channels, out_channels, *more):
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels), *more
    )


class LatentGNNOracle(nn.Module):
    """Latent-GNN: positions to nodes, nodes among themselves, nodes to positions; γ of it is added."""

    def __init__(self, channels, latent_dims, inner, *, mode="asymmetric", graph_conv=False):
        super().__init__()
        self.ends = ("_v2l", "_l2v") if mode == "asymmetric" else ("",)
        for end in self.ends:
            self.add_module(f"down_channel{end}", conv_norm(channels, inner))
        for i, d in enumerate(latent_dims):
            kernel = nn.Module()
            for end in self.ends:
                kernel.add_module(f"psi{end}", conv_norm(inner, d, nn.ReLU()))
            if graph_conv:
                kernel.GraphConvWeight = conv_norm(inner, inner, nn.ReLU())
            self.add_module(f"LatentGNN_Kernel_{i}", kernel)
        self.kernels = [self.get_submodule(f"LatentGNN_Kernel_{i}") for i in range(len(latent_dims))]
        self.up_channel = conv_norm(inner * len(latent_dims), channels)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        v, *other = (F.normalize(self.get_submodule(f"down_channel{end}")(x), dim=1) for end in self.ends)
        results = []
        for kernel in self.kernels:
            a = kernel.get_submodule(f"psi{self.ends[0]}")(v).flatten(2)
            if other:
                a = F.normalize(a, dim=2)
                b = F.normalize(kernel.psi_l2v(other[0]).flatten(2), dim=1)
            else:
                a = b = F.normalize(a, dim=1)
            nodes = torch.einsum("bdn,bcn->bdc", a, v.flatten(2))
            unit = F.normalize(nodes, dim=2)
            nodes = torch.einsum("bde,bec->bdc", torch.einsum("bdc,bec->bde", unit, unit).softmax(2), nodes)
            y = torch.einsum("bdc,bdn->bcn", nodes, b).unflatten(-1, x.shape[2:])
            results.append(kernel.GraphConvWeight(y) if hasattr(kernel, "GraphConvWeight") else y)
        return x + self.gamma * self.up_channel(torch.cat(results, dim=1))


class OfTokens(nn.Module):
    """A module of tokens (b, n, c), on maps."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.flatten(2).mT).mT.unflatten(-1, x.shape[2:])


class HydraOracle(nn.Module):
    """Hydra attention of tokens: queries and keys of unit length, as many heads as channels."""

    def __init__(self, channels):
        super().__init__()
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        pooled = (F.normalize(k, dim=-1) * v).sum(dim=1, keepdim=True)
        return self.out(F.normalize(q, dim=-1) * pooled)
