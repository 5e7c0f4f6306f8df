"""What every block promises, for every block: adding one to `BLOCKS` and `cases.py` puts it under test."""

import copy
import pickle
import warnings

import pytest
import torch
from cases import CASES, CHANNELS, DEFAULTS, Case, assert_close, image
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import polynl

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_block = pytest.mark.parametrize("case", DEFAULTS, ids=str)


def test_every_registered_block_is_under_contract() -> None:
    assert [case.name for case in DEFAULTS] == list(polynl.BLOCKS)


@pytest.mark.parametrize(("case", "axes"), [(case, axes) for case in CASES for axes in case.axes], ids=str)
def test_output_and_gradients_equal_the_literal_formula(case: Case, axes: int) -> None:
    block = case.build(torch.float64)
    shape = {1: (7,), 2: (5, 3), 3: (3, 2, 5)}[axes]
    x = torch.randn(2, CHANNELS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    inputs = [x, *block.parameters()]
    actual, expected = block(x), case.expected(block, x)
    assert not torch.equal(expected, x), "a block that does nothing proves nothing"
    assert_close(actual, expected, 1e-12)
    weights = torch.randn_like(x)
    for ours, literal in zip(
        torch.autograd.grad(actual, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        assert_close(ours, literal, 1e-12)


@every_case
def test_first_and_second_derivatives(case: Case) -> None:
    block = case.build(torch.float64)
    names = [name for name, _ in block.named_parameters()]
    shape = {1: (3,), 2: (3, 2), 3: (1, 3, 2)}[case.axes[0]]
    x = torch.randn(1, CHANNELS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [t.detach().requires_grad_() for t in (x, *block.parameters())]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@every_case
def test_without_gradients_values_are_the_same_and_the_input_is_left_alone(case: Case) -> None:
    """Inference may work in place; on its own maps only."""
    block = case.build(torch.float64)
    x = image(case, 2, CHANNELS, 6, 5, dtype=torch.float64)
    kept = x.clone()
    with torch.no_grad():
        z = block(x)
    assert torch.equal(x, kept)
    assert_close(z, case.expected(block, x), 1e-12)


@every_case
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(2, CHANNELS, 16, 16), (1, CHANNELS, 5, 4)])
def test_a_following_layer_may_work_in_place(case: Case, shape: tuple[int, ...], last: bool) -> None:
    block = case.build(torch.float64)
    x = image(case, *shape, dtype=torch.float64)
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    inputs = [x.requires_grad_(), *block.parameters()]
    actual = torch.autograd.grad(nn.ReLU(inplace=True)(block(x)).square().sum(), inputs)
    expected = torch.autograd.grad(block(x).relu().square().sum(), inputs)
    for ours, literal in zip(actual, expected, strict=True):
        assert_close(ours, literal, 1e-12)


@every_case
def test_permuting_positions(case: Case) -> None:
    """Equivariance where it holds; where it does not, the claim that it doesn't."""
    block = case.build(torch.float64)
    x = image(case, 2, CHANNELS, 6, 4, dtype=torch.float64)
    order = torch.randperm(x[0, 0].numel(), generator=torch.Generator().manual_seed(4))
    permuted = x.flatten(2)[..., order].reshape(x.shape)
    expected = block(x).flatten(2)[..., order].reshape(x.shape)
    assert torch.allclose(block(permuted), expected, rtol=1e-9, atol=1e-9) is case.equivariant


@every_case
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "expanded"])
def test_layout_and_dtype_of_the_input_are_kept(case: Case, layout: str) -> None:
    block = case.build()
    dense = image(case, 2, CHANNELS, 6, 5)
    last = torch.channels_last if dense.dim() == 4 else torch.channels_last_3d
    x = {
        "contiguous": dense,
        "channels_last": dense.contiguous(memory_format=last),
        "strided": dense.repeat_interleave(2, dim=-1)[..., ::2],
        "expanded": dense[:, :, :1].expand(dense.shape),
    }[layout]
    z = block(x)
    assert z.shape == x.shape
    assert z.dtype == x.dtype
    assert z.is_contiguous(memory_format=last if layout == "channels_last" else torch.contiguous_format)
    assert_close(z, block(x.contiguous()), 1e-5)


@every_case
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(1, CHANNELS, 6, 5), (2, CHANNELS, 1, 1), (1, CHANNELS, 1, 1)])
def test_axes_of_one_element_keep_their_strides(case: Case, shape: tuple[int, ...], last: bool) -> None:
    """Convolutions read the memory format from all strides, and round as they read it."""
    x = image(case, *shape)
    if last:  # as convolutions give it, also for one position
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    block = case.build()
    assert block(x).stride() == x.stride()
    with torch.no_grad():
        assert block(x).stride() == x.stride()


@every_case
@pytest.mark.parametrize(
    "shape", [(0, CHANNELS, 4, 3), (2, CHANNELS, 1, 1), (1, CHANNELS, 1, 1), (1, CHANNELS, 17, 1)]
)
def test_small_and_empty_maps(case: Case, shape: tuple[int, ...]) -> None:
    block = case.build()
    x = image(case, *shape).requires_grad_()
    z = block(x)
    z.sum().backward()
    assert z.shape == x.shape
    assert z.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@every_case
def test_shapes_can_be_had_without_memory(case: Case) -> None:
    x = image(case, 2, CHANNELS, 6, 5).to("meta")
    assert case.build().to("meta")(x).shape == x.shape


@every_case
def test_empty_batch_in_training(case: Case) -> None:
    block = case.build().train()
    before = copy.deepcopy(block.state_dict())
    block(image(case, 0, CHANNELS, 4, 3)).sum().backward()
    for name, value in block.state_dict().items():
        assert "num_batches" in name or torch.equal(value, before[name]), name


@every_case
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("from_half", [False, True], ids=["fp32_input", "half_input"])
def test_autocast_is_finite_for_large_input(case: Case, half: torch.dtype, from_half: bool) -> None:
    block = case.build()
    x = (30 * image(case, 2, CHANNELS, 9, 7)).to(half if from_half else torch.float32)
    with torch.autocast("cpu", dtype=half):
        z = block(x)
    z.float().mean().backward()
    assert z.dtype == x.dtype
    assert z.isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters())
    # Away from saturation the value is the one of fp32, to the precision of the dtypes involved.
    full = block(x.float())
    inside = full.abs() < torch.finfo(half).max / 2
    tolerance = 4 * torch.finfo(half).eps if from_half or not block.leaves_autocast else 1e-5
    assert_close(z.float()[inside], full[inside], tolerance)


@every_case
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_modules(case: Case, half: torch.dtype) -> None:
    """A module cast as a whole works with and without autocast, to the precision of its dtype."""
    block = case.build().to(half)
    x = (0.5 * image(case, 2, CHANNELS, 5, 4)).to(half)
    expected = copy.deepcopy(block).float()(x.float())
    with torch.autocast("cpu", dtype=half):
        under_autocast = block(x)
    for z in (block(x), under_autocast):
        assert z.dtype == half
        assert_close(z.float(), expected, 40 * torch.finfo(half).eps)


# Of the options, those that lead through other code. Autograd's own functions have to be lowered, too.
DIFFERENT = ("heads", "sub_sample", "graph_conv", "form")
CAPTURED = [case for case in CASES if case in DEFAULTS or any(name in case.options for name in DIFFERENT)]
every_captured_case = pytest.mark.parametrize("case", CAPTURED, ids=str)
LOWERED = ("poly_nl", "non_local")


@every_captured_case
def test_one_graph_under_compile_with_changing_sizes(case: Case) -> None:
    block = case.build()
    backend = "aot_eager" if case in DEFAULTS and case.name in LOWERED else "eager"
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    try:
        shapes = ((2, CHANNELS, 5, 4), (3, CHANNELS, 6, 7), (1, CHANNELS, 16, 16))
        for shape in shapes if case.name == "poly_nl" else shapes[:2]:
            x = image(case, *shape).requires_grad_()
            y = x.detach().clone().requires_grad_()
            actual, expected = compiled(x), block(y)
            assert_close(actual, expected, 1e-5)
            assert_close(
                torch.autograd.grad(actual.sum(), x)[0], torch.autograd.grad(expected.sum(), y)[0], 1e-5
            )
    finally:
        torch.compiler.reset()


@every_captured_case
def test_export_with_dynamic_batch_height_and_width(case: Case) -> None:
    block = case.build()
    # Pooling an axis of 3 leaves a single position, and torch specialises on sizes of 1.
    least = 4 if case.options.get("sub_sample") else 2
    x = image(case, 2, CHANNELS, 6, 5)
    dynamic = {
        0: torch.export.Dim("batch"),
        x.dim() - 2: torch.export.Dim("height", min=least),
        x.dim() - 1: torch.export.Dim("width", min=least),
    }
    program = torch.export.export(block, (x,), dynamic_shapes=(dynamic,))
    for shape in ((4, CHANNELS, 9, 4), (3, CHANNELS, 12, 20), (1, CHANNELS, least, least)):
        y = image(case, *shape)
        assert_close(program.module()(y), block(y), 1e-5)


@every_case
def test_per_sample_gradients_with_torch_func(case: Case) -> None:
    block = case.build(torch.float64)
    parameters = {name: p.detach() for name, p in block.named_parameters()}
    x = image(case, 3, CHANNELS, 4, 3, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(block, parameters, (sample.unsqueeze(0),)).square().mean()

    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        for name, gradient in grad(loss)(parameters, sample).items():
            assert_close(batched[name][i], gradient, 1e-10)


@every_case
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own jvp warns
def test_forward_mode_and_hessian(case: Case) -> None:
    block = case.build(torch.float64)
    x = image(case, 1, CHANNELS, 2, 1, dtype=torch.float64)
    direction = image(case, 1, CHANNELS, 2, 1, dtype=torch.float64).roll(1, dims=1)
    _, forward = jvp(block, (x,), (direction,))
    assert_close(forward, torch.autograd.functional.jvp(block, x, direction)[1], 1e-10)

    def loss(x: Tensor) -> Tensor:
        return block(x).square().sum()

    assert_close(hessian(loss)(x), torch.autograd.functional.hessian(loss, x), 1e-10)


@every_case
def test_copies_are_equal_and_independent(case: Case) -> None:
    block, x = case.build(), image(case, 2, CHANNELS, 5, 4)
    fresh = type(block)(CHANNELS, **case.options).eval()
    fresh.load_state_dict(block.state_dict())
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), fresh):
        assert torch.equal(other(x), block(x))
        assert repr(other) == repr(block)
        with torch.no_grad():
            first = next(other.parameters())
            first.add_(torch.arange(1, first.numel() + 1).view_as(first))  # norms undo a constant
        assert not torch.equal(other(x), block(x))


@every_case
def test_identity_start_and_what_learns_first(case: Case) -> None:
    x = image(case, 2, CHANNELS, 5, 4)
    block = polynl.build_block(case.name, CHANNELS, **{**case.options, "init": "identity"})
    for mode in (block.eval(), block.train()):
        assert torch.equal(mode(x), x)
    block(x).square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in block.parameters())
    random = polynl.build_block(case.name, CHANNELS, **{**case.options, "init": "random"})
    assert not torch.equal(random.eval()(x), x)


@every_case
def test_learns_from_the_identity(case: Case) -> None:
    """Every parameter moves within a few steps: nothing is cut off from the loss."""
    torch.manual_seed(0)
    block = polynl.build_block(case.name, CHANNELS, **case.options).double().train()
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    x = image(case, 4, CHANNELS, 6, 5, dtype=torch.float64)
    target = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = (block(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    still = [name for name, p in block.named_parameters() if torch.equal(p, before[name])]
    # At the start a softmax does not see a shift of all keys, nor a unit length the scale before its ReLU.
    assert not [name for name in still if not name.endswith(("bias", "to_latent.norm.weight"))], still


@every_block
def test_distributed_data_parallel(case: Case, tmp_path) -> None:
    block = case.build().train()
    alone = copy.deepcopy(block)
    x = image(case, 2, CHANNELS, 5, 4)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel = nn.parallel.DistributedDataParallel(block)
        parallel(x).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    alone(x).square().sum().backward()
    for ours, expected in zip(block.parameters(), alone.parameters(), strict=True):
        assert_close(ours.grad, expected.grad, 1e-5)


@every_case
def test_repr_shows_every_option(case: Case) -> None:
    shown = repr(case.build())
    for name, value in case.options.items():
        assert f"{name}={value!r}" in shown or (name == "latent_dims" and f"{name}=(" in shown)


@every_block
@pytest.mark.parametrize("given", [None, "a string", [1.0]])
def test_what_is_no_tensor_is_refused(case: Case, given: object) -> None:
    name = type(given).__name__
    with pytest.raises(TypeError, match=rf"\w+: x is a {name}; expected a tensor \(b, c, \*spatial\)"):
        case.build()(given)
    with torch.no_grad(), pytest.raises(TypeError, match=rf"x is a {name}"):
        case.build()(given)


@every_block
def test_subclasses_that_pass_options_on_can_be_printed(case: Case) -> None:
    class Own(type(case.build())):  # type: ignore[misc]
        def __init__(self, channels: int, note: str = "", **kw: object) -> None:
            super().__init__(channels, **kw)

    options = {**case.options, "init": "random"}
    shown = repr(nn.Sequential(Own(CHANNELS, "a note", **options)))
    assert f"Own(\n    {CHANNELS}, " in shown or f"Own({CHANNELS}, " in shown
    assert "init='random'" in shown
    assert "kw" not in shown
