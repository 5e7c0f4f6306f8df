"""Frames one after the other: blocks attend to all so far, as the literal formula over a 3-d map does."""

from pathlib import Path

import pytest
import torch
from cases import CHANNELS, SUMMARIZING, Case, assert_close
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import polynl
from polynl import ConvBaseline, NonLocal, PolyNL, Stream

CASES = [case for case in SUMMARIZING if case.pointwise and case.name not in ("conv", "polynomial")]
CASES = [case for case in CASES if not case.options.get("sub_sample")]  # windows over frames are others
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def video(frames: int = 4, batch: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(frames, batch, CHANNELS, 5, 4, dtype=torch.float64, generator=generator)


def as_maps(frames: Tensor) -> Tensor:
    """(t, b, c, h, w) as maps (b, c, t, h, w)."""
    return frames.permute(1, 2, 0, 3, 4)


@every_case
def test_a_frame_gets_what_the_block_computes_on_the_frames_so_far(case: Case) -> None:
    block, frames = case.build(torch.float64), video()
    with Stream(block) as stream:
        outputs = [stream(frame) for frame in frames]
    for t, output in enumerate(outputs, 1):
        assert_close(output, block(as_maps(frames[:t]))[:, :, -1], 1e-10)
    assert_close(block(frames[-1]), case.expected(block, frames[-1]), 1e-10)


class Host(nn.Module):
    """A 2-d network with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.first, self.second = PolyNL(CHANNELS, init="random"), NonLocal(CHANNELS, init="random")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.head(self.first(self.stem(x)).relu()))


def test_a_network_is_causal_frame_by_frame() -> None:
    torch.manual_seed(0)
    host, frames = Host().double(), video()
    with Stream(host) as stream:
        outputs = [stream(frame) for frame in frames]
    first, second = [], []
    for t, frame in enumerate(frames):
        first.append(host.stem(frame))
        middle = host.first(as_maps(torch.stack(first)))[:, :, -1]
        second.append(host.head(middle.relu()))
        assert_close(outputs[t], host.second(as_maps(torch.stack(second)))[:, :, -1], 1e-10)


@pytest.mark.parametrize("decay", [0.5, 0.9])
@every_case
def test_with_decay_earlier_frames_count_less(case: Case, decay: float) -> None:
    block, frames = case.build(torch.float64), video()
    with Stream(block, decay=decay) as stream:
        output = [stream(frame) for frame in frames][-1]
    maps = as_maps(frames)
    ages = torch.arange(len(frames) - 1, -1, -1, dtype=torch.float64)
    weights = (decay**ages)[None, :, None, None].expand(maps[:, 0].shape)
    assert_close(output, block(frames[-1], context=maps, mask=weights), 1e-10)


def test_after_a_reset_a_video_starts_anew() -> None:
    block, frames = PolyNL(CHANNELS, init="random").double(), video()
    stream = Stream(block)
    first = stream(frames[0])
    assert not torch.equal(stream(frames[0] + 1), block.attend(frames[0] + 1, block.summarize(frames[0] + 1)))
    stream.reset()
    assert_close(stream(frames[0]), first, 0)
    with pytest.raises(ValueError, match=r"of a batch of 1, and those before it of 2: call reset\(\)"):
        stream(frames[0, :1])
    stream.close()
    assert block.exchange is None


@pytest.mark.parametrize("case", CASES[:6], ids=str)
def test_a_stream_goes_on_from_a_saved_state(case: Case, tmp_path: Path) -> None:
    frames = video()
    block, twin = case.build(torch.float64), case.build(torch.float64)
    with Stream(block) as stream, Stream(twin) as other:
        for frame in frames[:2]:
            stream(frame)
        save_file(stream.state_dict(), tmp_path / "state.safetensors")
        other.load_state_dict(load_file(tmp_path / "state.safetensors"))
        for frame in frames[2:]:
            assert torch.equal(stream(frame), other(frame))


def test_a_state_of_another_model_is_refused() -> None:
    with Stream(PolyNL(CHANNELS).double()) as stream, Stream(Host().double()) as other:
        stream(video()[0])
        with pytest.raises(ValueError, match="'model/sums/count', which no block of this model has"):
            other.load_state_dict(stream.state_dict())
    with Stream(PolyNL(CHANNELS, reduction=2).double()) as narrow, pytest.raises(ValueError, match="another"):
        narrow.load_state_dict(stream.state_dict())
    cut = {key: tensor for key, tensor in stream.state_dict().items() if not key.endswith("count")}
    with pytest.raises(ValueError, match="the state of model is incomplete: it has no count"):
        stream.load_state_dict(cut)
    assert narrow.state_dict() == {}


@pytest.mark.parametrize("detach", [True, False])
def test_gradients_reach_earlier_frames_where_wanted(detach: bool) -> None:
    block, frames = PolyNL(CHANNELS, init="random").double(), video().requires_grad_()
    with Stream(block, detach=detach) as stream:
        [stream(frame) for frame in frames][-1].sum().backward()
    assert (frames.grad[0].abs().max() > 0) != detach
    assert frames.grad[-1].abs().max() > 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Stream(nn.Conv2d(3, 3, 1)), "Conv2d contains no block of polynl"),
        (lambda: Stream(polynl.TESA(8)), "model, a TESA, cannot be computed in parts: along rows"),
        (lambda: Stream(ConvBaseline(8, kernel_size=3)), "its kernel needs the neighbours"),
        (lambda: Stream(NonLocal(8, norm="layer")), "its layer norm is over all positions"),
        (lambda: Stream(NonLocal(8, norm="batch")), "batch norm takes statistics .* switch to eval mode"),
        (lambda: Stream(PolyNL(8), decay=0), "decay=0: expected a number above 0, up to 1"),
        (lambda: Stream(PolyNL(8), decay=1.5), "decay=1.5: expected"),
        (lambda: Stream("model"), "model is a str"),
    ],
)
def test_what_cannot_be_streamed_is_refused(make, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        make()


def test_a_block_is_in_one_stream_at_a_time() -> None:
    block = PolyNL(8)
    with Stream(block):
        with pytest.raises(ValueError, match="already in a stream or a shard"):
            Stream(block)
        assert block.exchange is not None


def test_a_batch_norm_that_is_switched_to_training_is_refused() -> None:
    block = NonLocal(8, norm="batch").eval()
    stream = Stream(block)
    block.train()
    with pytest.raises(ValueError, match="switch to eval mode"):
        stream(torch.zeros(1, 8, 3, 3))


def test_positions_of_weight_zero_stay_out_of_the_stream() -> None:
    block, frames = PolyNL(CHANNELS, init="random").double(), video(2)
    mask = torch.ones(2, 5, 4, dtype=torch.bool)
    mask[:, 3:] = False
    spoiled = frames[0].clone()
    spoiled[:, :, 3:] = torch.nan
    with Stream(block) as stream:
        stream(spoiled, mask=mask)
        output = stream(frames[1])
    summary = block.summarize(frames[0][:, :, :3]) + block.summarize(frames[1])
    assert_close(output, block.attend(frames[1], summary), 1e-10)
