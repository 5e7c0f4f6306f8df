"""A network run in tiles gives what it gives on the whole image."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import polynl
from polynl.beyond.tiles import NotTiledError, plan_tiles, run_tiled

BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "poly_nl": ("poly_nl", {}),
    "poly_nl_reduced": ("poly_nl", {"reduction": 2}),
    "dot_product": ("non_local", {"mode": "dot_product"}),
    "sub_sampled": ("non_local", {"mode": "embedded_gaussian", "sub_sample": "after", "pool_size": 2}),
    "concatenation": ("non_local", {"mode": "concatenation"}),
    "efficient_softmax": ("efficient_nl", {"normalization": "softmax"}),
    "efficient_none": ("efficient_nl", {"normalization": "none"}),
    "latent_gnn": ("latent_gnn", {}),
    "conv3": ("conv", {"kernel_size": 3}),
    # Any other, in its default form, unless it says that it has no summary.
    **{
        name: (name, {})
        for name, row in polynl.BLOCKS.items()
        if name not in ("poly_nl", "latent_gnn", "conv") and row.block(8).eval().why_not_in_parts() is None
    },
}


def randomized(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """In eval mode, with all parameters and statistics random: start values would hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif tensor.dim() < 2 and tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + 0.5)
    return model.to(dtype).eval()


class Classifier(nn.Module):
    """Strides of 4 in all, a global pooling, and room for blocks."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), norm(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), norm(8), nn.ReLU())
        self.last = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        x = x + self.last(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Skips from every level; `resize` brings the deep map to the size of the skip."""

    def __init__(self, resize: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.up1, self.up2 = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(11, 2, 3, padding=1)
        self.resize = resize

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        half = self.down1(image).relu()
        deep = self.down2(half).relu_()
        half = self.up1(torch.cat([self.resize(deep, half), half], dim=1)).relu()
        full = self.up2(torch.cat([self.resize(half, image), image], dim=1))
        return {"map": full, "score": full.mean((2, 3)), "deep": deep}


def resized(mode: str, align_corners: bool | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    def resize(x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(x, like.shape[-2:], mode=mode, align_corners=align_corners)

    return resize


def image(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def check(
    model: nn.Module, x: Tensor, tile: int | tuple[int, int], error: float = 1e-11, **options: Any
) -> None:
    """Every output in tiles equals that of the whole image, relative to its largest value."""
    with torch.no_grad():
        whole = model(x)
    tiled = run_tiled(model, x, tile, progress=False, **options)
    assert type(tiled) is type(whole)
    pairs = zip(tiled.values(), whole.values(), strict=True) if isinstance(whole, dict) else [(tiled, whole)]
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= error * theirs.abs().max()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_every_kind(name: str, keep: bool, tmp_path: Path) -> None:
    block, options = BLOCKS[name]
    model = Classifier()
    polynl.insert(model, block, before="last", after="stem", init="random", **options)
    check(randomized(model), image(2, 3, 73, 58), (24, 32), keep=tmp_path if keep else None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("norm", [lambda c: nn.GroupNorm(2, c), lambda c: nn.InstanceNorm2d(c, affine=True)])
def test_norms_over_positions(norm: Callable[[int], nn.Module]) -> None:
    check(randomized(Classifier(norm)), image(1, 3, 61, 50), 16)


@pytest.mark.parametrize("size", [(64, 48), (73, 50), (57, 97)])
@pytest.mark.parametrize(
    "resize", [resized("nearest"), resized("nearest-exact"), resized("bilinear"), resized("bilinear", True)]
)
def test_dense_outputs_of_odd_sizes(size: tuple[int, int], resize: Any, tmp_path: Path) -> None:
    model = UNet(resize)
    polynl.insert(model, "poly_nl", after="down2", init="random")
    check(randomized(model), image(1, 3, *size), (24, 28))
    check(model, image(1, 3, *size), 28, keep=tmp_path)


def test_pooling_into_bins_that_is_scaled_up_again() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.mix = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(8, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).relu()
            bins = F.interpolate(F.adaptive_avg_pool2d(y, (3, 2)), y.shape[-2:], mode="bilinear")
            return self.mix(torch.cat([y, bins], dim=1))

    check(randomized(Pyramid()), image(1, 3, 51, 40), 16)


def test_valid_convolutions_and_channels_last_heads() -> None:
    class Valid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.Sequential(nn.Conv2d(3, 4, 5), nn.MaxPool2d(3, 2), nn.Conv2d(4, 4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.convs(x).permute(0, 2, 3, 1).mean(dim=(1, 2))

    check(randomized(Valid()), image(1, 3, 49, 60), 16)


def test_a_resnet_in_single_precision() -> None:
    model = torchvision.models.resnet18(num_classes=7)
    polynl.insert(model, "poly_nl", before=["layer2.1", "layer3.1"], init="random", reduction=4)
    model = randomized(model, torch.float32)
    x = image(1, 3, 301, 250, dtype=torch.float32)
    plan = plan_tiles(model, x, 224)
    assert plan.network.strides == (32, 32)
    assert plan.grid.halos == ((224, 192), (224, 192))  # it sees 435 pixels
    assert [site.module for site in plan.reducing] == [
        "layer2.1.polynl_before",
        "layer3.1.polynl_before",
        "avgpool",
    ]
    assert "4 passes" in str(plan)
    check(model, x, 224, error=1e-5, halo=224)


def test_squeeze_and_excitation_of_a_segmentation_network() -> None:
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=3)
    assert len(plan_tiles(model.eval(), image(3, 400, 64), 384, halo=384).reducing) == 9


class Reader:
    """Rows and columns of a large image, made when they are asked for."""

    shape = (3, 90, 70)
    largest = 0

    def __getitem__(self, key: Any) -> np.ndarray:
        _, rows, columns = key
        y, x = np.arange(90)[rows, None], np.arange(70)[None, columns]
        self.largest = max(self.largest, (y + x).size)
        return np.stack([y * x % 251, y + x, y - x + 90]).astype(np.uint8)


def test_a_reader_is_asked_for_tiles_only_and_pixels_are_prepared() -> None:
    model, reader = randomized(Classifier()), Reader()
    score = run_tiled(model, reader, 24, prepare=lambda x: x.double() / 255, progress=False)
    whole = torch.from_numpy(Reader()[..., 0:90, 0:70])[None].double() / 255
    assert reader.largest < 90 * 70
    torch.testing.assert_close(score, model(whole), rtol=1e-11, atol=1e-11)


def test_a_zarr_array_is_read_as_it_is(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", reason="needs the extra 'clients'")
    x = image(3, 70, 50)
    zarr.save_array(str(tmp_path / "image.zarr"), x.numpy())
    model = randomized(Classifier())
    score = run_tiled(model, zarr.open(str(tmp_path / "image.zarr"), mode="r"), 24, progress=False)
    torch.testing.assert_close(score, model(x[None]), rtol=1e-11, atol=1e-11)


def test_features_of_a_module_instead_of_the_output() -> None:
    model, x = Classifier(), image(1, 3, 61, 50)
    polynl.insert(model, "poly_nl", before="body.1", after="last", init="random")
    model = randomized(model)
    for module, passes in (("stem", 1), ("body", 2), ("last.polynl_after", 3)):
        seen: list[Tensor] = []
        with model.get_submodule(module).register_forward_hook(lambda _, args, y, seen=seen: seen.append(y)):
            model(x)
        assert len(plan_tiles(model, x, 24, until=module).reducing) == passes - 1
        found = run_tiled(model, x, 24, until=module, progress=False)
        torch.testing.assert_close(found, seen[0], rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="Classifier has no module 'neck'; it has stem, "):
        run_tiled(model, x, 24, until="neck")


def test_a_module_that_is_not_called_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1))
    model.add_module("spare", nn.Identity())
    model.forward = model[0].forward
    with pytest.raises(ValueError, match="spare is not called in Sequential's forward pass"):
        run_tiled(model.eval(), image(1, 3, 40, 40, dtype=torch.float32), 16, until="spare")


def test_a_mapped_file_in_and_mapped_files_out(tmp_path: Path) -> None:
    model = randomized(UNet(resized("bilinear")))
    x = image(1, 3, 70, 50)
    pixels = np.lib.format.open_memmap(tmp_path / "in.npy", mode="w+", dtype=np.float64, shape=tuple(x.shape))
    pixels[:] = x.numpy()
    tiled = run_tiled(
        model, np.load(tmp_path / "in.npy", mmap_mode="r"), 24, out=tmp_path / "out.npy", progress=False
    )
    whole = model(x)
    for name in ("map", "deep"):
        np.testing.assert_allclose(np.load(tmp_path / f"out-{name}.npy"), whole[name].detach(), atol=1e-11)
    assert isinstance(tiled["map"], np.memmap)
    assert {p.name for p in tmp_path.iterdir()} == {"in.npy", "out-map.npy", "out-deep.npy"}


def test_tiles_of_the_output_go_to_a_function() -> None:
    model, x = randomized(nn.Conv2d(3, 2, 3, padding=1)), image(1, 3, 40, 30)
    whole, seen = torch.full((1, 2, 40, 30), torch.nan, dtype=torch.float64), []

    def write(name: str, rows: slice, columns: slice, part: Tensor) -> None:
        seen.append(name)
        whole[..., rows, columns] = part

    assert run_tiled(model, x, 16, out=write, progress=False) is None
    torch.testing.assert_close(whole, model(x))
    assert seen == [""] * 6


def test_the_model_is_left_as_it_was() -> None:
    model = Classifier()
    polynl.insert(model, "poly_nl", before="last", init="random")
    model = randomized(model)
    x = image(1, 3, 40, 40)
    before = model(x)
    with pytest.raises(ValueError, match="NaN"):
        run_tiled(model, x * torch.nan, 16, progress=False)
    assert torch.equal(model(x), before)


def test_progress_says_what_it_will_cost(capsys: pytest.CaptureFixture[str]) -> None:
    run_tiled(randomized(Classifier()), image(1, 3, 40, 40), 16)
    said = capsys.readouterr().err
    assert said.startswith("9 tiles of 16 × 16 pixels, with halos of up to 8 rows and 8 columns. 2 passes")
    assert "for the network itself and the output, which needs one tile" in said
    plan = plan_tiles(randomized(nn.Conv2d(3, 2, 3)), image(1, 3, 40, 40), 16)
    assert "columns. 1 pass, for the output: 2.2 times the work" in str(plan)


def test_an_image_of_one_tile_is_run_as_it_is() -> None:
    model = randomized(nn.Conv2d(3, 2, 3))
    plan = plan_tiles(model, image(3, 20, 20), 32)
    assert plan.runs() == 1
    assert torch.equal(run_tiled(model, image(3, 20, 20), 32, progress=False), model(image(3, 20, 20)[None]))


# What cannot be exact is refused.


class Fixed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.odd = nn.Conv2d(3, 4, 3, padding=1), Applied(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.conv(x))


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


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
        (ramp, "not do the same at all rows"),
        (doubled_if_large, "odd, a Applied, computes other things for images of another size"),
        (lambda x: x.argmax(dim=1), "int64"),
    ],
)
def test_what_is_not_exact_in_tiles_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(NotTiledError, match=message):
        run_tiled(randomized(Fixed(function)), image(1, 3, 80, 80), 40, progress=False)


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
    with pytest.raises(ValueError, match=r"NaN or infinite values in rows 48 to 89, columns 24 to 69"):
        run_tiled(model, x, 24, out=tmp_path / "out.npy", keep=tmp_path, progress=False)
    # Without a pass before the last, the file of the output is half written by then.
    with pytest.raises(ValueError, match="NaN or infinite values"):
        run_tiled(randomized(nn.Conv2d(3, 2, 3)), x, 24, out=tmp_path / "out.npy", progress=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.npy").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder; expected a file"):
        run_tiled(model, x, 24, out=tmp_path / "out.npy", progress=False)


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
