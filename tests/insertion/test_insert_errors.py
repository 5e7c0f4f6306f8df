"""Wherever no block can go, an error says so and leaves the model as it was."""

import warnings

import pytest
import torch
import torchvision
from hosts import Tiny, hooks
from torch import nn

from polynl.blocks.poly_nl import PolyNL
from polynl.insertion import insert, inserted, remove, restore, spec


def snapshot(model):
    return (
        {name: type(m) for name, m in model.named_modules()},
        {name: m.training for name, m in model.named_modules()},
        hooks(model),
        sorted(key for m in model.modules() for key in vars(m)),
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "before= or after="),
        ({"before": []}, "before= or after="),
        ({"before": "stagge"}, r"Tiny has no module 'stagge'\. Did you mean stage"),
        ({"before": "zzz"}, r"no module 'zzz'\. Its children are stem, norm"),
        ({"after": "empty"}, r'after "empty" \(Sequential\): it is empty'),
        ({"after": "listed"}, r'"listed" \(ModuleList\).*choose one of listed.0, listed.1'),
        ({"before": "unused"}, r'before "unused" \(Conv2d\).*does not call it'),
        ({"before": "named", "argument": "y"}, r"argument='y': the forward of Named takes x"),
        (
            {"before": "named", "argument": 1},
            r"no argument 1; choose one with argument=: x of shape \(1, 16,",
        ),
        ({"before": "named", "argument": "x.y"}, r"no item 'y' in a Tensor"),
        (
            {"after": "pair"},
            r'after "pair" \(Pair\).*tuple of 2; choose one with output=: 0 of shape \(1, 16,',
        ),
        ({"after": "pair", "output": 2}, r"no item '2' in a tuple"),
        ({"after": "pair", "argument": 0}, r"argument=0 is for blocks before a module: pass before="),
        ({"before": "stage", "layout": "nchw"}, r"layout='nchw': expected one of auto, channels_first"),
        ({"before": "stage", "prefix_tokens": -1}, r"prefix_tokens=-1: expected a number of tokens"),
        ({"before": "stage", "grid": 14}, r"grid=14: expected the height and width of the tokens"),
        (
            {"before": "stage", "grid": (2, 2), "layout": "channels_last"},
            r"for tokens .*layout='channels_last'",
        ),
        ({"before": "stage", "grid": (2, 2)}, r"got a tensor of shape \(1, 8, 112, 112\): tokens are"),
        ({"before": "fc"}, r'before "fc" \(Linear\).*\(1, 16\)'),
        ({"after": ["stage", "stage.1.1"]}, r'already a block after "stage.1.1"'),
        ({"before": "stage", "channels": 8, "example": 1}, "channels or example, not both"),
        (
            {"before": "stem", "example": torch.zeros(1, 5, 8, 8)},
            r"example failed.*5 channels(.|\n)*channels=",
        ),
        ({"before": ["stem", "stage"], "channels": 0}, "channels=0"),
        ({"before": "stem", "init": "zero"}, "init='zero'"),
    ],
)
def test_bad_places_and_values_leave_the_model_alone(arguments, match):
    model = Tiny()
    before = snapshot(model)
    with pytest.raises(ValueError, match=match):
        insert(model, "poly_nl", **arguments)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("block", "options", "match"),
    [
        (PolyNL(8), {}, r"got PolyNL\("),
        (8, {}, "got 8"),
        (lambda c: "text", {}, "got 'text'"),
        ("poly_nl", {"redukction": 2}, "redukction"),
        (PolyNL, {"redukction": 2}, "redukction"),
    ],
)
def test_bad_blocks_and_options(block, options, match):
    model = Tiny()
    before = snapshot(model)
    with pytest.raises(TypeError, match=match):
        insert(model, block, before=["stem", "stage"], **options)
    assert snapshot(model) == before


def test_unknown_block_lists_the_choices():
    with pytest.raises(ValueError, match=r"'polynl'.*non_local, tesa"):
        insert(Tiny(), "polynl", before="stage")


def test_a_block_that_fails_at_the_second_place_is_not_left_at_the_first():
    model = Tiny()
    before = snapshot(model)
    with pytest.raises(ValueError, match="reduction=8"):
        insert(model, "poly_nl", before="stage", after="stage.0", reduction=8)
    assert snapshot(model) == before


def test_inserting_twice():
    model = insert(Tiny(), "poly_nl", after="stage")
    before = snapshot(model)
    with pytest.raises(ValueError, match=r'already a block after "stage.1.1" \(Conv2d\)'):
        insert(model, "conv", before="stem", after="stage.1")
    assert snapshot(model) == before
    insert(remove(model), "conv", after="stage.1")


@pytest.mark.parametrize(
    "call",
    [
        lambda model: insert(model, "poly_nl", before="layer3.1"),
        remove,
        inserted,
        spec,
        lambda model: restore(model, spec(Tiny())),
    ],
)
@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("resnet50", r"nn.Module, got 'resnet50'; build .* torchvision.models.get_model\(\"resnet50\"\)"),
        (torchvision.models.resnet18, r"nn.Module, got <function resnet18 .*call it"),
        (Tiny, r"nn.Module, got <class 'hosts.Tiny'>.*call it"),
        ({"layer3.1.weight": 1}, "nn.Module, got a dict"),
    ],
)
def test_what_is_no_model(call, model, match):
    with pytest.raises(TypeError, match=match):
        call(model)


def test_removing_nothing_is_fine():
    model = Tiny()
    assert remove(remove(model)) is model


def test_guessing_needs_a_convolution():
    with pytest.raises(ValueError, match=r"no convolution(.|\n)*example="):
        insert(nn.Sequential(nn.ReLU()), "poly_nl", before="0")


def test_a_module_called_with_different_widths():
    with pytest.raises(ValueError, match=r'"layer1.0.relu" \(ReLU\).*\[64, 256\]'):
        insert(
            torchvision.models.resnet50(), "poly_nl", after="layer1.0.relu", example=torch.zeros(1, 3, 32, 32)
        )


def test_a_sequential_that_ends_in_a_module_used_elsewhere():
    act = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 3, 1), act, nn.Sequential(nn.Conv2d(3, 3, 1), act))
    with pytest.raises(ValueError, match=r'after "2" \(Sequential\): its child \'1\' is used in 2 places'):
        insert(model, "poly_nl", after="2")


def test_a_sequential_with_a_forward_of_its_own():
    class Stack(nn.Sequential):
        def forward(self, x):
            return [layer(x) for layer in self][-1]

    with pytest.raises(ValueError, match=r'"" \(Stack\).*choose one of 0, 1'):
        insert(Stack(nn.Conv2d(3, 3, 1), nn.ReLU()), "poly_nl", after="")


def test_more_axes_than_a_map_has():
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Unflatten(1, (1, 2)))
    with pytest.raises(ValueError, match=r"one map or tokens, got a tensor of shape \(2, 1, 2, 2, 3, 3\)"):
        insert(model, "poly_nl", after="1", example=torch.zeros(2, 4, 3, 3))


def test_a_scripted_module():
    model = Tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.stem = torch.jit.trace(model.stem, torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r'before "stem".*scripted'):
        insert(model, "poly_nl", before="stem")


@pytest.mark.parametrize(
    ("side", "name", "match"),
    [
        ("after", "pair", r"after Pair needs one tensor.*tuple of 2; choose one with output=: 0 of"),
        ("before", "keywords", r"before Keywords got no argument 0; choose one with argument=: x of"),
    ],
)
def test_what_no_pass_could_see_fails_when_it_runs(side, name, match):
    model = insert(Tiny(), "poly_nl", **{side: name}, channels=16)
    with pytest.raises(TypeError, match=match):
        model(torch.randn(2, 3, 8, 8))
