"""Blocks go into networks of every kind, and change nothing until they are trained."""

import pytest
import torch
from architectures import HOSTS
from hosts import hooks, layout_at, randomised
from torch.utils._pytree import tree_leaves

from polynl.insertion import insert, inserted, remove, restore, spec

# Warnings that the packages cause among themselves.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def outputs(model, x, place):
    """All tensors that the module there returns, and then the model."""
    found = []
    watch = model.get_submodule(place).register_forward_hook(lambda _, args, output: found.append(output))
    with watch, torch.no_grad():
        found.append(model(x))
    leaves = tree_leaves([dict(value) if isinstance(value, dict) else value for value in found])
    return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", HOSTS)
def test_a_network_keeps_its_output_and_keys_until_its_block_is_trained(name):
    host = HOSTS[name]
    torch.manual_seed(0)
    model = host.make().eval()

    def results():
        return outputs(model, host.input, host.place)

    keys, plain = list(model.state_dict()), results()
    sides = {"argument": "before", "output": "after"}
    places = {sides[item]: host.place for item in host.options}
    insert(model, "poly_nl", **(places or {"before": host.place}), **host.options, example=(host.input,))

    assert {layout_at(model, block) for block in inserted(model)} == {host.layout}
    assert same(results(), plain)
    assert [key for key in model.state_dict() if "polynl_" not in key] == keys

    description, state = spec(model), randomised(model).state_dict()
    trained = results()
    assert not same(trained, plain)
    remove(model)
    assert same(results(), plain)
    assert hooks(model) == []
    restore(model, description).load_state_dict(state)
    assert same(results(), trained)
