"""`reset_parameters`, the meta device, hosts that initialise layers, and older state dicts."""

import copy
from collections.abc import Callable

import pytest
import torch
from cases import CASES, CHANNELS, DEFAULTS, Case, image
from torch import Tensor, nn

import polynl

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_block = pytest.mark.parametrize("case", DEFAULTS, ids=str)


def new(case: Case, init: str = "identity") -> polynl.Block:
    torch.manual_seed(0)
    return polynl.build_block(case.name, CHANNELS, **case.options, init=init)


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def reset(block: polynl.Block) -> polynl.Block:
    torch.manual_seed(1)
    block.reset_parameters()
    return block


@every_case
@pytest.mark.parametrize("init", ["identity", "random"])
def test_reset_restores_the_start(case: Case, init: str) -> None:
    expected = reset(new(case, init))
    used = new(case, init).train()
    used(image(case, 2, CHANNELS, 6, 5))  # moves the statistics of batch norms
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.fill_(3)
    assert_same(reset(used), expected)
    x = image(case, 2, CHANNELS, 6, 5)
    assert torch.equal(used(x), x) is (init == "identity")
    spread = {name: p.std() for name, p in new(case, init).named_parameters() if p.dim() == 2}
    for name, start in spread.items():
        assert 0.5 * start <= used.get_parameter(name).std() <= 2 * start, name


@every_case
def test_reset_after_the_meta_device(case: Case) -> None:
    with torch.device("meta"):
        block = new(case)
    assert all(t.is_meta for t in block.state_dict().values())
    block.to_empty(device="cpu")
    with torch.no_grad():
        for value in block.state_dict().values():
            value.fill_(7)  # what the memory may hold
    assert_same(reset(block), reset(new(case)))


def by_apply(host: nn.Module, init: Callable[[nn.Module], None]) -> None:
    host.apply(init)


def by_loop(host: nn.Module, init: Callable[[nn.Module], None]) -> None:
    for module in host.modules():
        init(module)


def as_transformers_do(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.ones_(module.bias)


def as_every_layer_does(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@every_case
@pytest.mark.parametrize("visit", [by_apply, by_loop])
@pytest.mark.parametrize("init", [as_transformers_do, as_every_layer_does])
def test_a_host_that_initialises_its_layers_leaves_the_identity(
    case: Case, visit: Callable[..., None], init: Callable[[nn.Module], None]
) -> None:
    host = nn.Sequential(nn.Linear(5, 5), new(case))
    before = host[0].weight.detach().clone()
    visit(host, init)
    assert not torch.equal(host[0].weight, before)
    x = image(case, 2, CHANNELS, 6, 5)
    for mode in (host.train(), host.eval()):
        assert torch.equal(mode[1](x), x)


def older(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As before scales had an axis, linear maps with norms lost their layer, and factors were stacked."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        owner, _, leaf = name.rpartition(".")
        if leaf in ("alpha", "beta", "gamma"):
            found[name] = value.reshape(())
        elif leaf == "factors":
            found |= {f"{name}.{i}": factor for i, factor in enumerate(value)}
        elif leaf in ("weight", "bias") and owner.endswith(("out", "to_latent", "from_latent", "graph")):
            found[f"{owner}.linear.{leaf}"] = value
        else:
            found[name] = value
    return found


@every_case
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_older_versions_load(case: Case, assign: bool) -> None:
    block = nn.Sequential(case.build())
    state = older(block.state_dict())
    kept = dict(state)
    host = nn.Sequential(new(case))
    host.load_state_dict(state, strict=True, assign=assign)
    assert_same(host, block)
    assert state.keys() == kept.keys(), "the caller's state dict is left as it was"


@every_block
def test_scales_have_an_axis(case: Case) -> None:
    """FSDP cannot shard what has none."""
    assert all(p.dim() > 0 for p in new(case).parameters())


def test_a_wrong_shape_is_still_refused() -> None:
    state = polynl.PolyNL(CHANNELS).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for alpha"):
        polynl.PolyNL(CHANNELS).load_state_dict({**state, "alpha": torch.ones(2)})


def test_start_values_do_not_depend_on_the_way_there() -> None:
    """A copy that is reset draws the same numbers."""
    block = new(DEFAULTS[0])
    assert_same(reset(copy.deepcopy(block)), reset(block))
