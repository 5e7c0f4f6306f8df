"""What records a block: torch.jit.trace, torch.jit.script and torch.fx."""

import pytest
import torch
from cases import CASES, CHANNELS, DEFAULTS, Case, assert_close, image
from torch import Tensor, nn

from polynl import NonLocal

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_block = pytest.mark.parametrize("case", DEFAULTS, ids=str)


@every_case
@pytest.mark.parametrize(("last", "gradients"), [(False, False), (True, True)], ids=["first", "last-grad"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_of_one_map_is_right_for_others(case: Case, last: bool, gradients: bool) -> None:
    """With torch's own check, which traces again without gradients and compares the graphs."""
    block = case.build()
    x = image(case, 1, CHANNELS, 16, 16)
    if last:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(block, (x,))
        for shape in ((4, CHANNELS, 16, 16), (2, CHANNELS, 9, 7), (1, CHANNELS, 8, 32)):
            y = image(case, *shape)
            assert_close(traced(y), block(y), 1e-5)


@every_block
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_script_says_what_to_use_instead(case: Case) -> None:
    with pytest.raises(TypeError, match=r"torch.jit.script cannot compile \w+: use torch.compile"):
        torch.jit.script(nn.Sequential(nn.ReLU(), case.build()))


class Host(nn.Module):
    """A network of one's own with a block in it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 1)
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.stem(x)).relu().mean(dim=(2, 3))


@pytest.mark.parametrize("case", [case for case in CASES if 2 in case.axes], ids=str)
def test_a_symbolic_trace_holds_the_block_as_one_node(case: Case) -> None:
    host = Host(case.build())
    with torch.no_grad():
        graph = torch.fx.symbolic_trace(host)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["stem", "block"]
    x = torch.randn(2, 3, 6, 5)
    assert torch.equal(graph(x), host(x))


class Masked(Host):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.block(self.stem(x), mask=mask)


def test_a_symbolic_trace_keeps_the_mask() -> None:
    host = Masked(DEFAULTS[4].build())
    graph = torch.fx.symbolic_trace(host)
    x, mask = torch.randn(2, 3, 6, 5), torch.rand(2, 6, 5) > 0.5
    assert torch.equal(graph(x, mask), host(x, mask))
    assert not torch.equal(graph(x, mask), graph(x, torch.ones_like(mask)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_of_a_map_smaller_than_the_pool_is_refused() -> None:
    """The window would be as small for all maps."""
    block = NonLocal(CHANNELS, sub_sample="after")
    with pytest.raises(ValueError, match=r"x has \(1, 8\) positions; a trace that pools needs"):
        torch.jit.trace(block, torch.randn(1, CHANNELS, 1, 8))
