"""What cannot be run in tiles is refused by name, and bad input is one clear line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from tile_cases import Classifier, Fixed, Reader, UNet, check, image, randomized, resized
from torch import Tensor, nn

import polynl
from polynl.beyond.tiles import NotTiledError, run_tiled

# What cannot be exact is refused.


def scaled_by_rows(x: Tensor) -> Tensor:
    return x * x.shape[2]


def deformed(x: Tensor) -> Tensor:
    offsets = x.mean(dim=1, keepdim=True).expand(-1, 18, -1, -1)
    return torchvision.ops.deform_conv2d(x, offsets, x.new_ones(2, 4, 3, 3), padding=1)


def cropped_and_padded(x: Tensor) -> Tensor:
    return F.avg_pool2d(x[:, :, 4:-4, 4:-4], 3, stride=1, padding=1)


def warped(x: Tensor) -> Tensor:
    return F.grid_sample(x, x[:, :2].movedim(1, 3), align_corners=False)


def ramp(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[2], dtype=x.dtype)[:, None]


def doubled_if_large(x: Tensor) -> Tensor:
    return x if x.shape[2] < 100 else x * 2


def softmax_over_rows(x: Tensor) -> Tensor:
    return x.softmax(dim=2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: F.interpolate(x, (7, 7)),
            r"odd cannot be run in tiles: interpolates to the fixed size \(7, 7\)",
        ),
        (lambda x: F.interpolate(x, x.shape[2:], mode="bicubic"), "odd .*mode='bicubic'"),
        (softmax_over_rows, "odd, a Applied, .* rows"),
        (lambda x: x.roll(1, dims=3), "odd, a Applied, .*columns"),
        (lambda x: x[:, :, 0, 0], "odd, a Applied"),
        (lambda x: x.mean(dim=3), "odd, a Applied"),
        (ramp, "odd, a Applied, does not do the same at all rows"),
        (scaled_by_rows, "odd, a Applied, does not do the same at all rows or for all sizes"),
        (deformed, "odd, a Applied, .* samples a map at computed places"),
        (warped, "odd, a Applied, .* samples a map at computed places"),
        (lambda x: (x > 0).to(x.dtype), r"odd, a Applied, decides by the values of its map \(gt\).* halo="),
        (cropped_and_padded, r"more than \d rows .* pass them as halo="),
        (doubled_if_large, "odd, a Applied, computes other things for images of another size"),
        (lambda x: x.argmax(dim=1), "int64"),
    ],
)
def test_what_is_not_exact_in_tiles_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(NotTiledError, match=message):
        run_tiled(randomized(Fixed(function)), image(1, 3, 80, 80), 40, progress=False)


def test_a_halo_that_was_given_is_checked() -> None:
    convs, x = nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1) for _ in range(5)]), image(1, 3, 80, 80)
    with pytest.raises(ValueError, match="a halo of 2 rows is too small: this network needs 5"):
        run_tiled(randomized(convs), x, 40, halo=2, progress=False)
    with pytest.raises(NotTiledError, match=r"odd, a Applied, .* effect on distant rows"):
        run_tiled(randomized(Fixed(softmax_over_rows)), x, 40, halo=8, progress=False)
    # Where a halo cannot be found, it can be given.
    check(randomized(Fixed(lambda x: torch.where(x > 0.5, x, -x))), x, 40, halo=8)
    check(randomized(Fixed(cropped_and_padded)), x, 40, halo=12)


def test_blocks_without_a_summary_and_training_mode_are_refused() -> None:
    model = Classifier()
    with pytest.raises(NotTiledError, match=r"it is in training mode; call model.eval\(\)"):
        run_tiled(model, image(1, 3, 40, 40), 16)
    model.double().eval().body[1].train()
    with pytest.raises(NotTiledError, match=r"its module body\.1, a BatchNorm2d, is in training mode"):
        run_tiled(model, image(1, 3, 40, 40), 16)
    polynl.insert(model.eval(), "tesa", before="last")
    with pytest.raises(NotTiledError, match=r"last.polynl_before cannot be run in tiles"):
        run_tiled(model, image(1, 3, 40, 40), 16)


def test_a_network_of_one_size_is_refused() -> None:
    class OneSize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[2] == 40, "only 40 rows"
            return x

    with pytest.raises(NotTiledError, match="fails in it with AssertionError: only 40 rows"):
        run_tiled(OneSize().eval(), image(1, 3, 40, 40), 16)


def test_an_image_that_is_too_small_for_the_network_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    pooled = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(3))
    with pytest.raises(
        NotTiledError, match=r"an image of 40 × 2 pixels fails in it with RuntimeError: .*small"
    ):
        run_tiled(randomized(pooled), image(1, 3, 40, 2), 16)
    assert caplog.records == []


# Bad input is one clear line, and nothing is left behind.


class EndsEarly(Reader):
    def __getitem__(self, key: Any) -> np.ndarray:
        return super().__getitem__(key)[:, :20]


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    model = randomized(UNet(resized("nearest")))
    x = image(1, 3, 90, 70)
    with pytest.raises(ValueError, match=r"the image ends early: rows 0 to \d+, .* shape \(1, 3, 20, \d+\)"):
        run_tiled(model, EndsEarly(), 24, prepare=lambda x: x / 255, out=tmp_path / "out.npy", progress=False)
    x[..., 80, 60] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinite values in rows 36 to 81, columns 24 to 69"):
        run_tiled(model, x, 24, out=tmp_path / "out.npy", keep=tmp_path, progress=False)
    # Without a pass before the last, the file of the output is half written by then.
    with pytest.raises(ValueError, match="NaN or infinite values"):
        run_tiled(randomized(nn.Conv2d(3, 2, 3)), x, 24, out=tmp_path / "out.npy", progress=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.npy").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder; expected a file"):
        run_tiled(model, x, 24, out=tmp_path / "out.npy", progress=False)


def test_a_folder_that_is_not_writable_is_named_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polynl.beyond.tiles.outputs.os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"out='map.npy': the folder \. is not writable"):
        run_tiled(randomized(Classifier()), Reader(), 16, out="map.npy", progress=False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tile": 4}, ValueError, "tile=4 is smaller than the halo of 8 pixels .* use at least 8"),
        ({"tile": 0}, ValueError, "tile=0: expected an integer of at least 1"),
        ({"tile": 16.0}, ValueError, "tile=16.0: expected an integer of at least 1"),
        ({"tile": (16, 16, 16)}, ValueError, "tile=.*or two of them"),
        ({"halo": 5}, ValueError, r"halo=5: expected a multiple of the network's stride, \(4, 4\)"),
        ({"image": [[1.0]]}, TypeError, "image is a list; expected a tensor"),
        ({"image": torch.rand(40, 40)}, ValueError, r"shape \(40, 40\); expected \(c, h, w\)"),
        (
            {"image": torch.zeros(3, 40, 40, dtype=torch.uint8)},
            TypeError,
            "dtype torch.uint8; .*pass prepare=",
        ),
        ({"prepare": lambda x: x[..., ::2]}, ValueError, "expected a function of single pixels"),
        ({"out": "map.png"}, ValueError, "expected a file that ends in .npy"),
        ({"out": "nowhere/map.npy"}, FileNotFoundError, "there is no folder nowhere"),
        ({"keep": "nowhere"}, FileNotFoundError, "keep='nowhere': there is no such folder"),
        ({"model": "resnet18"}, TypeError, "model is a str; expected a torch.nn.Module"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "model": randomized(Classifier()),
        "image": image(1, 3, 40, 40),
        "tile": 16,
        "progress": False,
    }
    with pytest.raises(error, match=message):
        run_tiled(**{**arguments, **change})
