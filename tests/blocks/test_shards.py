"""Two and three processes, each with a strip of the map, compute what one does with all of it."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CHANNELS, SUMMARIZING, Case, image
from ranks import on_ranks
from torch import Tensor, distributed

import polynl
from polynl import NonLocal, PolyNL

CASES = [case for case in SUMMARIZING if case.pointwise and not case.options.get("sub_sample")]
STRIPS = {2: [9, 5], 3: [2, 7, 5]}


@pytest.mark.parametrize("ranks", STRIPS)
def test_strips_on_processes_are_computed_as_the_whole_map(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, compare_all, tmp_path, ranks)


def compare_all(rank: int, ranks: int) -> None:
    for case in CASES if ranks == 2 else {case.name: case for case in CASES}.values():
        compare(case, rank, STRIPS[ranks])
    check_one_collective(rank, STRIPS[ranks])
    if ranks == 2:
        shard_differently(rank)
        reduce_differently(rank)


def compare(case: Case, rank: int, strips: list[int]) -> None:
    """Outputs, and gradients of the input and of the parameters, of a loss over all positions."""
    alone, x = case.build(torch.float64), image(case, 2, CHANNELS, sum(strips), 3, dtype=torch.float64)
    block, whole = copy.deepcopy(alone), x.detach().clone().requires_grad_()
    strip = x.detach().split(strips, dim=2)[rank].clone().requires_grad_()
    cotangent = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = alone(whole)
    (expected * cotangent).sum().backward()
    output = polynl.shard(block)(strip)
    (output * cotangent.split(strips, dim=2)[rank]).sum().backward()

    def close(ours: Tensor, theirs: Tensor, what: str) -> None:
        scale = max(1.0, theirs.abs().max().item())
        assert (ours - theirs).abs().max() <= 1e-12 * scale, (str(case), what)

    close(output, expected.split(strips, dim=2)[rank], "output")
    close(strip.grad, whole.grad.split(strips, dim=2)[rank], "input gradient")
    for (name, ours), theirs in zip(block.named_parameters(), alone.parameters(), strict=True):
        distributed.all_reduce(ours.grad)
        close(ours.grad, theirs.grad, name)
    again = polynl.unshard(block)(whole)
    close(again, expected, "after unshard")


def check_one_collective(rank: int, strips: list[int]) -> None:
    """A pass has one all-reduce for each block."""
    calls, reduce = [], distributed.all_reduce
    block = polynl.shard(NonLocal(CHANNELS, init="random"))

    def counted(tensor: Tensor, **options: Any) -> Any:
        calls.append(tensor.numel())
        return reduce(tensor, **options)

    distributed.all_reduce = counted
    try:
        output = block(torch.randn(2, CHANNELS, strips[rank], 3, requires_grad=True))
        assert len(calls) == 1
        output.sum().backward()
        assert calls == [calls[0]] * 2
    finally:
        distributed.all_reduce = reduce


def shard_differently(rank: int) -> None:
    """Processes with other models are named, on all of them."""
    for first, second, place in (
        (PolyNL(8), PolyNL(16), "different blocks at model: PolyNL"),
        (PolyNL(8), NonLocal(8), "PolyNL.* on rank 0, NonLocal.* on 1"),
        (PolyNL(8), torch.nn.Sequential(PolyNL(8)), "different blocks at model"),
    ):
        block = (first, second)[rank]
        with pytest.raises(ValueError, match=place):
            polynl.shard(block)
        assert all(getattr(module, "exchange", None) is None for module in block.modules())


def reduce_differently(rank: int) -> None:
    """Other channels, blocks and batches are named, where gloo would end the process."""
    maps = [torch.randn(1, channels, 3, 3) for channels in (8, 16)]
    blocks = [PolyNL(8), PolyNL(16)][rank], [PolyNL(8), NonLocal(8)][rank]
    with pytest.raises(ValueError, match=r"summaries: products \(8,\) .* rank 0, products \(16,\) .* rank 1"):
        blocks[0].summarize(maps[rank]).all_reduce()
    with pytest.raises(ValueError, match=r"different summaries: products \(8,\) .* on rank 0, .* on rank 1"):
        blocks[1].summarize(maps[0]).all_reduce()
    block = polynl.shard(torch.nn.Sequential(PolyNL(8)))
    with pytest.raises(
        ValueError, match=r"^0: .* of a batch of 2, torch.float32 on rank 0, .* of 1, .* rank 1"
    ):
        block(torch.randn(2 - rank, 8, 3, 3))


def test_without_processes_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="start the processes with torchrun"):
        polynl.shard(PolyNL(8))


def test_blocks_in_a_stream_cannot_be_sharded(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 's'}", rank=0, world_size=1)
    try:
        block = PolyNL(8)
        with polynl.Stream(block), pytest.raises(ValueError, match="model is already in a stream"):
            polynl.shard(block)
        assert copy.deepcopy(polynl.shard(block)).exchange is not None
        with pytest.raises(ValueError, match="already in a stream or a shard"):
            polynl.Stream(block)
    finally:
        distributed.destroy_process_group()


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "beyond.md").read_text()
    (script,) = (
        fence for fence in re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M) if "main()" in fence
    )
    (tmp_path / "strips.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*command, "strips.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert sorted(re.findall(r"rank (\d): 45 rows", run.stdout)) == ["0", "1"]
