"""Blocks on arguments and outputs that are not the first tensor: by name, by position, inside containers."""

import copy
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from polynl.insertion import insert, inserted, remove, restore, spec

Features = namedtuple("Features", ["low", "high"])


class Inner(nn.Module):
    def forward(self, x, skip, *rest, scale, **more):
        return (x + skip) * scale


class Listed(nn.Module):
    def forward(self, features):
        return features


class Host(nn.Module):
    """A module with several arguments, and one that gets and returns a container."""

    def __init__(self, container):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.inner, self.listed, self.container = Inner(), Listed(), container

    def forward(self, x):
        x = self.stem(x)
        x = self.inner(x, skip=2 * x, scale=3 * x)
        features = self.listed(self.container(x, x + 1))
        low, high = features.values() if isinstance(features, dict) else features
        return low, high


def as_tuple(*values):
    return values


def as_dict(*values):
    return OrderedDict(zip(("0", "high"), values, strict=True))


def plus_one(channels):
    """A module that says where it is: it adds 1."""
    norm = nn.BatchNorm2d(channels, eps=0, affine=False).eval()
    norm.running_mean.fill_(-1)
    return norm


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (None, lambda x: (x + 1 + 2 * x) * 3 * x),
        (0, lambda x: (x + 1 + 2 * x) * 3 * x),
        ("x", lambda x: (x + 1 + 2 * x) * 3 * x),
        ("skip", lambda x: (x + 2 * x + 1) * 3 * x),
        (1, lambda x: (x + 2 * x + 1) * 3 * x),
        ("scale", lambda x: (x + 2 * x) * (3 * x + 1)),
    ],
)
def test_an_argument_is_chosen_by_name_or_position_however_it_is_passed(argument, expected):
    model, x = Host(as_tuple).eval(), torch.randn(2, 3, 4, 5)
    insert(model, plus_one, before="inner", argument=argument, example=x).eval()
    torch.testing.assert_close(model(x)[0], expected(model.stem(x)))


@pytest.mark.parametrize(
    ("container", "item"),
    [(as_tuple, 1), (lambda *values: list(values), "1"), (Features, 1), (as_dict, "high"), (as_dict, "0")],
)
@pytest.mark.parametrize("side", ["before", "after"])
def test_an_item_inside_a_container(container, item, side):
    model, x = Host(container).eval(), torch.randn(2, 3, 4, 5)
    plain = model(x)
    kinds = []
    model.listed.register_forward_hook(lambda _, args, output: kinds.append((type(args[0]), type(output))))
    choice = {"argument": f"features.{item}"} if side == "before" else {"output": item}
    insert(model, plus_one, **{side: "listed"}, **choice, example=x).eval()
    low, high = model(x)
    added = (1, 0) if item == "0" else (0, 1)
    torch.testing.assert_close((low, high), (plain[0] + added[0], plain[1] + added[1]))
    assert len({*kinds[-1]}) == 1  # containers keep their type


def test_what_the_caller_passed_is_not_changed():
    model, features = Listed(), [torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)]
    insert(model, plus_one, before="", argument="features.0", channels=4).eval()
    assert model(features)[0].eq(1).all()
    assert features[0].eq(0).all()


def test_a_module_called_by_keyword_needs_no_name():
    class Named(nn.Module):
        def forward(self, *, x):
            return x

    class Caller(nn.Module):
        def __init__(self):
            super().__init__()
            self.named = Named()

        def forward(self, x):
            return self.named(x=x)

    model, x = Caller(), torch.randn(1, 4, 2, 3)
    insert(model, plus_one, before="named", example=x).eval()
    torch.testing.assert_close(model(x), x + 1)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ({"before": "inner"}, {"argument": "skip"}),
        ({"after": "listed"}, {"output": 1}),
        ({"before": "listed"}, {"argument": "features.1"}),
    ],
)
def test_specs_copies_and_graphs_keep_the_choice(place, options):
    model, x = Host(as_tuple).double().eval(), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    twin = Host(as_tuple).double().eval()
    plain = model(x)
    insert(model, "poly_nl", **place, **options, example=x)
    assert all(map(torch.equal, model(x), plain))
    for block in inserted(model).values():
        nn.init.ones_(block.beta)
    expected = model(x)
    assert not all(map(torch.equal, expected, plain))
    assert spec(model)["blocks"][0]["item"] == next(iter(options.values()))
    restore(twin, spec(model)).load_state_dict(model.state_dict())
    for other in (twin, copy.deepcopy(model)):
        assert all(map(torch.equal, other(x), expected))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    assert not [key for m in remove(model).modules() for key in vars(m) if "polynl" in key]
