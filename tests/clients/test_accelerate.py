"""Accelerate's offloading: parameters come to a layer when it is called, and leave it afterwards."""

import pytest
import torch
from torch import nn

import polynl

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install 'polynl[clients]'"
)


@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize("name", polynl.BLOCKS)
def test_parameters_offloaded_to_the_cpu(name: str, size: int) -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Conv2d(3, 16, 1), polynl.build_block(name, 16, init="random")).eval()
    x = torch.randn(1, 3, size, size)
    with torch.no_grad():
        expected = host(x)
        accelerate.cpu_offload(host, execution_device=torch.device("cpu"))
        assert all(p.is_meta for p in host.parameters())
        torch.testing.assert_close(host(x), expected, rtol=1e-5, atol=1e-5)
