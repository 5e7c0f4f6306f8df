"""Readers of large images: the pixels of any part, whatever the file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polynl.data import large_images
from polynl.data.images import UnreadableImageError
from polynl.data.large_images import Pixels, open_large, thumbnail

PART = (..., slice(20, 55), slice(3, 40))


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)


def check(path: Path, pixels: np.ndarray) -> None:
    """The reader gives the shape and the pixels of an image (h, w, 3)."""
    expected = torch.from_numpy(pixels).permute(2, 0, 1)
    with open_large(path) as reader:
        assert tuple(reader.shape) == tuple(expected.shape)
        assert torch.equal(reader[PART], expected[PART])


def test_arrays_with_channels_first_last_or_none(tmp_path: Path, pixels: np.ndarray) -> None:
    grey = np.repeat(pixels[..., :1], 3, axis=2)
    alpha = np.concatenate([pixels, pixels[..., :1]], axis=2)
    for number, (array, expected) in enumerate(
        [
            (pixels, pixels),
            (pixels.transpose(2, 0, 1), pixels),
            (grey[..., 0], grey),
            (grey[None, ..., 0], grey),
            (alpha, pixels),
        ]
    ):
        np.save(tmp_path / f"{number}.npy", array)
        check(tmp_path / f"{number}.npy", expected)


def test_pictures_are_decoded(tmp_path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(tmp_path / "image.png")
    check(tmp_path / "image.png", pixels)


def test_a_zarr_array_and_the_first_level_of_a_pyramid(tmp_path: Path, pixels: np.ndarray) -> None:
    zarr = pytest.importorskip("zarr", reason="needs the extra 'clients'")
    zarr.save_array(str(tmp_path / "array.zarr"), pixels)
    check(tmp_path / "array.zarr", pixels)
    zarr.save_group(str(tmp_path / "levels.zarr"), **{"0": pixels, "1": pixels[::2, ::2]})
    check(tmp_path / "levels.zarr", pixels)


@pytest.mark.parametrize("options", [{"tile": (32, 32), "compression": "zlib"}, {"rowsperstrip": 7}, {}])
def test_a_tiff_is_read_in_parts(tmp_path: Path, pixels: np.ndarray, monkeypatch: Any, options: Any) -> None:
    tifffile = pytest.importorskip("tifffile", reason="needs the extra 'clients'")
    pytest.importorskip("zarr", reason="needs the extra 'clients'")
    monkeypatch.setattr(large_images, "MOST_PIXELS", 100)  # so that none is decoded as a whole
    tifffile.imwrite(tmp_path / "colour.tif", pixels, photometric="rgb", **options)
    check(tmp_path / "colour.tif", pixels)
    tifffile.imwrite(tmp_path / "grey.tif", pixels[..., 0], photometric="minisblack", **options)
    check(tmp_path / "grey.tif", np.repeat(pixels[..., :1], 3, axis=2))


@pytest.mark.parametrize("installed", [True, False])
def test_other_tiffs_are_decoded_as_a_whole(
    tmp_path: Path, pixels: np.ndarray, monkeypatch: Any, installed: bool
) -> None:
    if not installed:
        monkeypatch.setattr(large_images.importlib.util, "find_spec", lambda name: None)
    sixteen = pixels[..., 0].astype(np.uint16) * 257
    Image.fromarray(sixteen).save(tmp_path / "grey.tif")
    check(tmp_path / "grey.tif", np.repeat(pixels[..., :1], 3, axis=2))
    Image.fromarray(pixels).save(tmp_path / "packed.tif", compression="tiff_lzw")  # needs imagecodecs
    check(tmp_path / "packed.tif", pixels)
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "print.tif")
    with Image.open(tmp_path / "print.tif") as image:
        check(tmp_path / "print.tif", np.array(image.convert("RGB")))


def test_a_picture_that_is_too_large_says_which_files_are_read_in_parts(
    tmp_path: Path, pixels: np.ndarray, monkeypatch: Any
) -> None:
    monkeypatch.setattr(large_images, "MOST_PIXELS", 100)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    with (
        pytest.raises(UnreadableImageError, match=r"image.png .*70 × 90 pixels .* in parts from .npy, .zarr"),
        open_large(tmp_path / "image.png"),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("half.npy", None, "half.npy is not a readable image: "),
        ("text.tif", b"text", "text.tif is not a readable image: "),
        ("float.npy", np.zeros((4, 4, 3)), "float64; expected uint8"),
        ("flat.npy", np.zeros(4, np.uint8), r"shape is \(4,\); expected \(h, w\)"),
        ("wide.npy", np.zeros((8, 9, 7), np.uint8), "expected 1, 3 or 4 channels, first or last"),
    ],
)
def test_what_is_no_image_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif content is None:
        np.save(path, np.zeros((40, 40, 3), np.uint8))
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.write_bytes(content)
    with pytest.raises(UnreadableImageError, match=message), open_large(path):
        pass


def test_an_error_in_a_part_names_the_file() -> None:
    class Broken:
        shape, dtype = (9, 9, 3), np.dtype(np.uint8)

        def __getitem__(self, key: Any) -> Any:
            raise RuntimeError("block 7 is damaged")

    with pytest.raises(UnreadableImageError, match=r"slide\.tif is not a readable image: block 7 is damaged"):
        Pixels(Broken(), Path("slide.tif"))[..., 0:2, 0:2]


@pytest.mark.parametrize(("side", "shape"), [(100, (3, 90, 70)), (40, (3, 30, 24)), (9, (3, 9, 7))])
def test_a_thumbnail_has_equally_distant_pixels(
    pixels: np.ndarray, side: int, shape: tuple[int, ...]
) -> None:
    reader = Pixels(pixels, Path("image"))
    small = thumbnail(reader, side, band=16)
    step = -(-90 // side)
    assert small.shape == shape
    assert torch.equal(small, reader[..., 0:90, 0:70][..., ::step, ::step])
