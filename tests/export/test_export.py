"""Exported programs compute what the model computes, or there is no file."""

from __future__ import annotations

import dataclasses
import errno
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import CHANNELS, VARIANTS, Everything, randomised, small_network
from torch import Tensor, nn
from torch.export import ExportedProgram

import polynl
from polynl.export import RUNTIMES, Export, ExportError, export, writing
from polynl.export.axes import Open, three_inputs, with_limits
from polynl.export.checks import relative_difference

OPEN = ("batch", "height", "width")
# What torch and its converters warn about does not concern the export.
pytestmark = pytest.mark.filterwarnings("ignore")


def need(runtime: str) -> None:
    for package in RUNTIMES[runtime].packages:
        extra = "executorch" if runtime == "executorch" else "export"
        pytest.importorskip(package, reason=f"needs the extra {extra!r}")


@pytest.fixture(scope="module")
def everything() -> tuple[nn.Module, Tensor, ExportedProgram]:
    """All blocks, an example, and their program, which takes longer than all else."""
    model, example = randomised(Everything()), torch.randn(2, CHANNELS, 8, 7)
    with torch.no_grad():
        return model, example, writing.exported_program(model, example, {0: None, 2: None, 3: None})


@pytest.mark.parametrize("runtime", ["onnx", "openvino"])  # of torch.export, see the blocks' own tests
def test_every_block_at_three_sizes(
    everything: Any, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(runtime)
    model, example, program = everything
    monkeypatch.setattr(writing, "exported_program", lambda *_: program)
    file = tmp_path / f"all{RUNTIMES[runtime].suffix}"
    done = export(model, file, example, to=runtime, dynamic=OPEN, tolerance=1e-5)
    assert len({comparison.shape for comparison in done.comparisons}) == 3
    assert {1, 2, 3} == {comparison.shape[0] for comparison in done.comparisons}
    assert done.seconds > 0
    check_all(RUNTIMES[runtime].load(file), model)


def check_all(run: Callable[[Tensor], Sequence[Tensor]], model: nn.Module) -> None:
    """Compare all blocks at a size that no exporter has seen."""
    y = torch.randn(5, CHANNELS, 11, 6)
    with torch.no_grad():
        expected = model(y)
    for (name, own), output in zip(expected.items(), run(y), strict=True):
        assert relative_difference(output, own) < 1e-5, name


def test_every_block_in_the_older_onnx_exporter(tmp_path: Path) -> None:
    need("onnx")
    model = randomised(Everything())
    torch.onnx.export(
        model,
        (torch.randn(2, CHANNELS, 8, 7),),
        tmp_path / "all.onnx",
        dynamo=False,
        input_names=["input"],
        dynamic_axes={"input": {0: "batch", 2: "height", 3: "width"}},
    )
    check_all(RUNTIMES["onnx"].load(tmp_path / "all.onnx"), model)


def test_every_block_traced_by_openvino(tmp_path: Path) -> None:
    need("openvino")
    import openvino

    # It takes a layer called `graph` for the graph of the traced module.
    model = randomised(Everything({key: row for key, row in VARIANTS.items() if "graph_conv" not in row[1]}))
    traced = openvino.convert_model(model, example_input=torch.randn(2, CHANNELS, 8, 7))
    openvino.save_model(traced, tmp_path / "all.xml", compress_to_fp16=False)
    check_all(RUNTIMES["openvino"].load(tmp_path / "all.xml"), model)


@pytest.mark.parametrize("name", ["poly_nl", "latent_gnn"])
def test_executorch_with_a_dynamic_batch(name: str, tmp_path: Path) -> None:
    need("executorch")
    block = randomised(polynl.build_block(name, CHANNELS))
    done = polynl.export.to_executorch(
        block, tmp_path / "block.pte", torch.randn(1, CHANNELS, 6, 5), dynamic=OPEN, tolerance=1e-5
    )
    assert [path.name for path in tmp_path.iterdir()] == ["block.pte"]
    assert [comparison.shape[0] for comparison in done.comparisons] == [3, 1, 2]


def test_programs_have_no_operations_that_converters_lack(everything: Any) -> None:
    """aten::mT is unknown to tracing exporters, addcmul to Core ML, batch norms of open maps to XNNPACK."""
    model, example, program = everything
    traced: Any = torch.jit.trace(model, (example,), strict=False, check_trace=False)
    for text in (str(traced.inlined_graph), str(program.graph)):
        operations = set(re.findall(r"aten(?:::|\.)(\w+)", text))
        assert operations & {"conv1d", "_convolution"}
        assert not operations & {"mT", "addcmul", "batch_norm"}


def test_onnx_is_one_file_with_names(tmp_path: Path) -> None:
    need("onnx")
    import onnxruntime

    polynl.export.to_onnx(small_network(), tmp_path / "m.onnx", torch.randn(1, 3, 9, 9), dynamic=OPEN)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (given,), (returned,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape) == ("input", ["batch", 3, "height", "width"])
    assert (returned.name, returned.shape) == ("output", ["batch", CHANNELS])


@pytest.fixture(scope="module")
def small_program() -> ExportedProgram:
    with torch.no_grad():
        return writing.exported_program(small_network(), torch.randn(2, 3, 9, 9), {0: None, 2: None, 3: None})


def faulty(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let the torch runtime return something else."""
    sound = RUNTIMES["torch"]

    def load(file: Path) -> Any:
        run = sound.load(file)
        return lambda x: [change(x, y) for y in run(x)]

    monkeypatch.setitem(RUNTIMES, "torch", dataclasses.replace(sound, load=load))


def fail_on_large(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[-1] > 9:
        raise RuntimeError("\n  too large\nfor a reason")
    return y


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: y * 1.01, r"torch.export differs from PyTorch by 1.0e-02 on an input \(3, 3, 11, 7\)"),
        (lambda x, y: y * float("nan"), "by nan"),
        (lambda x, y: y[:1], r"the outputs are \[\(1, 8\)\]; expected \[\(3, 8\)\]"),
        (fail_on_large, r"torch.export fails on an input \(2, 3, 7, 11\): too large$"),
    ],
)
def test_a_wrong_file_is_not_left_and_an_old_one_is_kept(
    change: Any, message: str, small_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "exported_program", lambda *_: small_program)
    faulty(monkeypatch, change)
    file = tmp_path / "model.pt2"
    file.write_text("old")
    with pytest.raises(ExportError, match=message):
        polynl.export.to_torch(small_network(), file, torch.randn(1, 3, 9, 9), dynamic=OPEN)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.pt2", "old")]


def test_a_runtime_that_cannot_read_its_file_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converting(monkeypatch, lambda program: lambda file: file.write_bytes(b"no"))
    with pytest.raises(ExportError, match=r"torch.export cannot run this model: "):
        polynl.export.to_torch(small_network(), tmp_path / "m.pt2", torch.randn(1, 3, 9, 9))
    assert list(tmp_path.iterdir()) == []


def converting(monkeypatch: pytest.MonkeyPatch, convert: Callable[[ExportedProgram], Any]) -> None:
    changed = dataclasses.replace(RUNTIMES["torch"], convert=convert)
    monkeypatch.setitem(RUNTIMES, "torch", changed)


def full_disk(file: Path) -> None:
    file.write_text("half of it")
    raise OSError(errno.ENOSPC, "No space left on device", str(file))


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converting(monkeypatch, lambda program: full_disk)
    file = tmp_path / "m.pt2"
    with pytest.raises(
        ExportError, match=f"^{re.escape(str(file))} cannot be written: No space left on device$"
    ):
        polynl.export.to_torch(small_network(), file, torch.randn(1, 3, 9, 9))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_on_disk_while_a_program_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converters import much, and a signal during an import ends the process at once."""
    seen: list[list[Path]] = []

    def convert(program: ExportedProgram) -> Any:
        seen.append(list(tmp_path.iterdir()))
        return sound(program)

    sound = RUNTIMES["torch"].convert
    converting(monkeypatch, convert)
    polynl.export.to_torch(small_network(), tmp_path / "m.pt2", torch.randn(1, 3, 9, 9))
    assert seen == [[]]


def test_an_old_file_is_not_left_with_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As .xml and .bin of OpenVINO, if the process ends between the two."""
    moves = []

    def replace(source: Path, target: Path) -> None:
        moves.append(target.name)
        if target.suffix == ".xml":
            raise KeyboardInterrupt
        target.write_text(source.read_text())

    (tmp_path / "staged").mkdir()
    for name in ("m.xml", "m.bin"):
        (tmp_path / name).write_text("old")
        (tmp_path / "staged" / name).write_text("new")
    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(KeyboardInterrupt):
        writing._put_in_place(tmp_path / "staged" / "m.xml")
    assert moves == ["m.bin", "m.xml"]
    assert not (tmp_path / "m.xml").exists()


def test_a_network_trained_in_channels_last(tmp_path: Path) -> None:
    """XNNPACK refuses a convolution in that layout whose batch norm it folds."""
    model = small_network().to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    file = polynl.export.to_torch(model, tmp_path / "m.pt2", torch.randn(1, 3, 9, 9)).file
    assert all(value.is_contiguous() for value in torch.export.load(file).state_dict.values())
    assert not model[0].weight.is_contiguous()


def test_executorch_runs_a_network_trained_in_channels_last(tmp_path: Path) -> None:
    need("executorch")
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    model = randomised(model).to(memory_format=torch.channels_last)
    polynl.export.to_executorch(model, tmp_path / "m.pte", torch.randn(1, 3, 9, 9), dynamic=OPEN)


def test_the_model_stays_as_it_is_and_fixed_sizes_get_three_inputs(tmp_path: Path) -> None:
    model = small_network().train()
    done = polynl.export.to_torch(model, tmp_path / "new" / "m.pt2", torch.zeros(1, 3, 9, 9))
    assert all(module.training for module in model.modules())
    assert int(model[1].num_batches_tracked) == 0
    assert [comparison.shape for comparison in done.comparisons] == [(1, 3, 9, 9)] * 3
    assert isinstance(done, Export)
    assert done.file.is_file()


def test_inputs_have_the_values_of_the_example() -> None:
    example = torch.tensor([1.0, 2.0, 4.0]).expand(1, 2, 4, 3)
    axes: Open = {0: 2, 3: None}
    first, own, last = three_inputs(example, axes)
    assert own is example
    assert (first.shape, last.shape) == ((2, 2, 4, 2), (2, 2, 4, 4))
    assert set(last.unique().tolist()) == {1.0, 2.0, 4.0}
    assert three_inputs(torch.zeros(1, 2, 4, 3), axes)[0].std() > 0.5, "a constant would show little"
    assert with_limits({0: None, 2: None, 3: 5}, example) == {0: 8, 2: 8, 3: 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"to": "onx"}, "no runtime is called 'onx'. Did you mean onnx"),
        ({"dynamic": ("heigth",)}, "no axis is called 'heigth'. Did you mean height"),
        ({"dynamic": "batch"}, "dynamic='batch': expected a sequence of names"),
        ({"dynamic": ("depth",)}, r"depth: the example has shape \(1, 3, 9, 9\), without this axis"),
        ({"dynamic": {"height": 8}}, "height: at most 8, but the example"),
        ({"dynamic": {"batch": 1}}, "batch: at most 1 is a fixed size; leave it out"),
        ({"file": "m.onnx"}, "m.onnx must end in .pt2, since it is for torch.export"),
        ({"example": None}, "example is a NoneType; expected a tensor"),
        ({"model": torch.relu}, "model is a builtin_function_or_method; expected an nn.Module"),
        ({"example": torch.zeros(0, 3, 9, 9)}, r"example has shape \(0, 3, 9, 9\), which is empty"),
    ],
)
def test_mistakes_are_named(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"file": "m.pt2", "example": torch.zeros(1, 3, 9, 9), "to": "torch"} | change
    with pytest.raises((ValueError, TypeError), match=message):
        export(**{"model": small_network(), **options})
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_branches_on_values_is_named(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError, match=r"torch.export cannot follow Branching: .+"):
        polynl.export.to_torch(Branching(), tmp_path / "m.pt2", torch.randn(1, 3, 9, 9))
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_the_network_itself_fixes_is_named_in_its_words(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 9 * 9, 2))
    with pytest.raises(ExportError, match=r"Sequential fails on an input \(1, 3, 9, 7\): .+"):
        polynl.export.to_torch(model, tmp_path / "m.pt2", torch.randn(1, 3, 9, 9), dynamic=["width"])
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_returns_more_than_tensors_is_named(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None, int]:
            return x, None, 3

    with pytest.raises(ExportError, match="Mixed returns NoneType, int; expected tensors only"):
        polynl.export.to_torch(Mixed(), tmp_path / "m.pt2", torch.randn(1, 3, 9, 9))


def test_what_a_converter_lacks_is_named(tmp_path: Path) -> None:
    """Not the first line of torch's error, which lists what to do next."""
    need("onnx")

    class Values(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x)

    with pytest.raises(ExportError, match=r"ONNX Runtime cannot run this model: No ONNX function .*svd"):
        polynl.export.to_onnx(Values(), tmp_path / "m.onnx", torch.randn(1, 3, 9, 9))


def test_the_reason_is_what_follows_a_colon() -> None:
    assert (
        writing.first_line(ValueError("\nconflicts:\n\n  - at most 1\n  - more")) == "conflicts: - at most 1"
    )
    assert writing.first_line(ValueError("nothing follows:")) == "nothing follows:"
    assert writing.first_line(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_aotinductor_compiles_blocks(tmp_path: Path) -> None:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    names = ("poly_nl", "latent_gnn", "efficient_nl", "tesa")
    model = randomised(Everything({name: VARIANTS[name] for name in names}))
    with torch.no_grad():
        program = writing.exported_program(model, torch.randn(2, CHANNELS, 8, 7), {0: None, 2: None, 3: None})
        compiled = aoti_load_package(aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2")))
        for shape in ((2, CHANNELS, 8, 7), (3, CHANNELS, 5, 9)):
            x = torch.randn(shape)
            actual, expected = compiled(x), model(x)
            assert {name: relative_difference(actual[name], expected[name]) < 1e-5 for name in names} == (
                dict.fromkeys(names, True)
            )


def test_torchao_quantizes_the_linear_layers_of_blocks() -> None:
    pytest.importorskip("torchao", reason="needs the extra 'executorch'")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    x = torch.randn(2, 32, 6, 6)
    for name in ("poly_nl", "non_local", "efficient_nl", "xca"):
        block = polynl.build_block(name, 32, init="random").eval()
        with torch.no_grad():
            expected = block(x)
            quantize_(block, Int8WeightOnlyConfig())
            error = relative_difference(block(x), expected)
        assert 0 < error < 0.02, name
