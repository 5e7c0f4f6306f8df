import pytest
import torch
from hosts import HOSTS


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=HOSTS)
def host(request):
    make, target, widths, shape = HOSTS[request.param]
    return make().eval(), target, widths, torch.randn(shape)
