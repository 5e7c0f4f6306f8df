"""A network run in tiles gives what it gives on the whole image."""

from collections.abc import Callable
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
from polynl.beyond.tiles import plan_tiles, run_tiled

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


def test_a_network_that_needs_wide_images() -> None:
    """95 pixels on a side: as in Inception, all of its convolutions are valid."""
    strided = [nn.Conv2d(channels, 4, 3, stride=2) for channels in (3, 4, 4, 4)]
    model = nn.Sequential(*strided, nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3))
    check(randomized(model), image(1, 3, 330, 110), (96, 110))


def test_a_mean_with_the_names_of_numpy() -> None:
    model = Fixed(lambda x: x * torch.mean(input=x, axis=(2, 3), keepdims=True))
    check(randomized(model), image(1, 3, 49, 60), 16)


@pytest.mark.parametrize("size", [(60, 52), (73, 50), (57, 97), (91, 63)])
def test_padding_that_depends_on_the_size(size: tuple[int, int], tmp_path: Path) -> None:
    """As in TensorFlow: what an odd size lacks is padded on the other side."""

    class Same(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            rows, columns = (max((-(-side // 2) - 1) * 2 + 3 - side, 0) for side in x.shape[2:])
            sides = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
            return F.conv2d(F.pad(x, sides), self.weight, self.bias, stride=2)

    model = nn.Sequential(Same(3, 8, 3), nn.ReLU(), Same(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    check(randomized(model), image(1, 3, *size), (24, 28))
    check(model, image(1, 3, *size), 16, keep=tmp_path)


def test_windows_of_several_sizes() -> None:
    """Tiles have to begin where the windows of every block begin: at multiples of 48 pixels here."""
    model = Classifier()
    polynl.insert(model, "non_local", after="stem", init="random", sub_sample="after", pool_size=8)
    polynl.insert(model, "non_local", after="body", init="random", sub_sample="after", pool_size=3)
    check(randomized(model), image(1, 3, 170, 58), (64, 48))
    assert plan_tiles(model, image(1, 3, 170, 58), (100, 48)).grid.tile == (96, 48)


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
