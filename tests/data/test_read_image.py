"""Images from files: the pixels that PIL has, or an error that names the file."""

from __future__ import annotations

import importlib.util
import io
import os
import struct
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from polynl.data import images as classification
from polynl.data.images import UnreadableImageError, read_image

DATA = os.environ.get("POLYNL_DATA")


def picture(mode: str = "RGB", size: tuple[int, int] = (37, 29)) -> Image.Image:
    """Smooth but for some noise, different in every channel."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    small = np.random.default_rng(0).integers(0, 256, (5, 7, bands), dtype=np.uint8)
    layers = [
        Image.fromarray(small[:, :, band]).resize(size, Image.Resampling.BICUBIC) for band in range(bands)
    ]
    return Image.merge(mode, layers) if bands > 1 else layers[0].convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rotated_by_exif() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(), "JPEG", exif=exif)


def sixteen_bits() -> Image.Image:
    return Image.fromarray(np.arange(0, 29 * 37 * 60, 60, dtype=np.uint16).reshape(29, 37))


JPEGS: dict[str, bytes] = {
    "baseline": encoded(picture(), "JPEG", quality=90),
    "progressive": encoded(picture(), "JPEG", progressive=True),
    "full colour": encoded(picture(), "JPEG", subsampling=0, quality=97),
    "restart markers": encoded(picture(), "JPEG", restart_marker_blocks=2),
    "grey": encoded(picture("L"), "JPEG"),
    "four colours": encoded(picture("CMYK"), "JPEG"),
    "rotated by EXIF": rotated_by_exif(),
    "one pixel": encoded(picture(size=(1, 1)), "JPEG"),
    "fill bytes": encoded(picture(), "JPEG").replace(b"\xff\xdb", b"\xff\xff\xff\xdb"),
    "with a thumbnail": encoded(
        picture(), "JPEG", subsampling=0, quality=97, comment=encoded(picture(size=(8, 8)), "JPEG")
    ),
}
OTHERS: dict[str, bytes] = {
    "PNG": encoded(picture(), "PNG"),
    "PNG, palette": encoded(picture().quantize(20), "PNG"),
    "PNG, palette, one colour transparent": encoded(picture().quantize(20), "PNG", transparency=3),
    "PNG, palette, half transparent": encoded(
        picture().quantize(20), "PNG", transparency=bytes(range(0, 200, 10))
    ),
    "PNG, transparent": encoded(picture("RGBA"), "PNG"),
    "PNG, grey and transparent": encoded(picture("LA"), "PNG"),
    "PNG, black and white": encoded(picture("L").convert("1"), "PNG"),
    "PNG, one pixel": encoded(picture(size=(1, 1)), "PNG"),
    "WEBP": encoded(picture(), "WEBP"),
    "WEBP, transparent": encoded(picture("RGBA"), "WEBP", lossless=True),
    "BMP": encoded(picture(), "BMP"),
    "TIFF": encoded(picture(), "TIFF"),
    "PPM": encoded(picture(), "PPM"),
}


def as_pil_has_it(content: bytes) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(content)) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def decoded(folder: Path, content: bytes) -> Tensor | str:
    """What is read from a file with this content, or what the error says."""
    path = folder / "image.jpg"
    path.write_bytes(content)
    try:
        return read_image(path)
    except UnreadableImageError as error:
        message = str(error)
        assert message.startswith(f"{path} is not a readable image: ")
        assert "\n" not in message
        assert "0x" not in message, "no addresses of objects"
        return message.partition("image: ")[2]


# Good files


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bits_are_brought_to_8(tmp_path: Path, format: str) -> None:
    """Where PIL would cut off at 255."""
    image = decoded(tmp_path, encoded(sixteen_bits(), format))
    assert isinstance(image, Tensor)
    expected = torch.from_numpy(np.asarray(sixteen_bits()).astype(np.float64) / 257).round()
    assert torch.equal(image, expected.to(torch.uint8).expand(3, -1, -1))


def test_other_numbers_are_no_image(tmp_path: Path) -> None:
    floats = encoded(Image.fromarray(np.full((2, 3), 0.25, dtype=np.float32)), "TIFF")
    expected = "its values are from 0.25 to 0.25, and only those of 8 or 16 bits are read"
    assert decoded(tmp_path, floats) == expected


@pytest.mark.parametrize("kind", [*JPEGS, *OTHERS])
def test_an_image_is_what_pil_makes_of_it(tmp_path: Path, kind: str) -> None:
    content = (JPEGS | OTHERS)[kind]
    image, expected = decoded(tmp_path, content), as_pil_has_it(content)
    assert isinstance(image, Tensor)
    assert image.dtype == torch.uint8
    assert image.shape == ((3, 1, 1) if "one pixel" in kind else (3, 29, 37)), "EXIF turns nothing"
    assert torch.equal(image, expected)


def test_jpegs_are_decoded_by_torchvision_and_without_it_by_pil(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    decode = classification._decode_jpeg
    assert decode is not None

    def counted(*arguments: Any, **options: Any) -> Tensor:
        used.append(1)
        return decode(*arguments, **options)

    monkeypatch.setattr(classification, "_decode_jpeg", counted)
    first = decoded(tmp_path, JPEGS["baseline"])
    decoded(tmp_path, OTHERS["PNG"])
    assert used == [1]
    monkeypatch.setattr(classification, "_decode_jpeg", None)
    second = decoded(tmp_path, JPEGS["baseline"])
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(first, second)


@pytest.mark.parametrize("tail", [b"\0", bytes(5000), b"\xff\xd9", b"<!-- added -->" * 20, b"\xff\xd8\xff"])
@pytest.mark.parametrize("kind", ["baseline", "progressive", "grey", "four colours"])
def test_what_comes_after_a_jpeg_is_left_alone(tmp_path: Path, kind: str, tail: bytes) -> None:
    image = decoded(tmp_path, JPEGS[kind] + tail)
    assert isinstance(image, Tensor)
    assert torch.equal(image, as_pil_has_it(JPEGS[kind]))


@pytest.mark.skipif(DATA is None, reason="POLYNL_DATA names no folder with images")
def test_real_images_are_what_pil_makes_of_them() -> None:
    files = sorted(Path(str(DATA), "imagenet-samples").glob("*.JPEG"))[::3]
    assert files
    for file in files:
        assert torch.equal(read_image(file), as_pil_has_it(file.read_bytes()))


# Bad files


@pytest.mark.parametrize("kind", [*JPEGS, *OTHERS])
def test_a_file_that_is_cut_short_is_no_image(tmp_path: Path, kind: str) -> None:
    """Wherever it is cut; unless nothing of the image was lost."""
    content = (JPEGS | OTHERS)[kind]
    whole, end = as_pil_has_it(content), len(content)
    for cut in sorted({*range(0, end, max(1, end // 60)), *range(max(0, end - 20), end)}):
        image = decoded(tmp_path, content[:cut])
        assert isinstance(image, str) or torch.equal(image, whole), cut
        assert isinstance(image, str) or cut >= end - 30, f"{cut} of {end} bytes cannot be all of it"


@pytest.mark.parametrize("kind", JPEGS)
def test_a_download_that_ends_in_zeros_is_no_image(tmp_path: Path, kind: str) -> None:
    content = JPEGS[kind]
    for share in (0.3, 0.6, 0.9):
        cut = int(len(content) * share)
        assert isinstance(decoded(tmp_path, content[:cut] + bytes(len(content) - cut)), str)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty"),
        (b"<html>404 Not Found</html>\n", "it has no known format"),
        (np.random.default_rng(1).bytes(3000), "it has no known format"),
        (b"\xff\xd8" + np.random.default_rng(1).bytes(3000), ""),
        (b"\x89PNG\r\n\x1a\n" + np.random.default_rng(1).bytes(300), ""),
        (b"\xff\xd8\xff\xd9", ""),
    ],
    ids=["empty", "text", "garbage", "garbage like JPEG", "garbage like PNG", "JPEG of nothing"],
)
def test_what_is_no_image_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    reason = decoded(tmp_path, content)
    assert isinstance(reason, str)
    assert reason.startswith(expected)
    assert reason


def test_whatever_a_decoder_raises_ends_as_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (
        struct.error("unpack requires 4 bytes"),
        EOFError(),
        KeyError("x"),
        MemoryError(),
        ValueError("a\nb"),
    ):

        def failing(*arguments: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(Image, "open", failing)
        reason = decoded(tmp_path, OTHERS["PNG"])
        assert isinstance(reason, str)
        assert reason


def test_a_file_that_is_gone_or_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gone.jpg"
    with pytest.raises(
        UnreadableImageError, match=r"gone\.jpg is not a readable image: No such file or directory$"
    ):
        read_image(path)
    path.mkdir()
    with pytest.raises(UnreadableImageError, match=r"Is a directory$"):
        read_image(path)

    def forbidden(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    # Not by chmod: who runs the tests as root may read everything.
    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(UnreadableImageError, match=r"gone\.jpg is not a readable image: Permission denied$"):
        read_image(path)


def claiming(content: bytes, width: int, height: int) -> bytes:
    """The file with another size in its header."""
    if content.startswith(b"\xff\xd8"):
        place = next(content.index(marker) for marker in (b"\xff\xc0", b"\xff\xc2") if marker in content) + 5
        size = struct.pack(">HH", height, width)
    elif content.startswith(b"\x89PNG"):
        place, start = 16, 12
        size = struct.pack(">II", width, height)
        header = content[start:place] + size + content[24:29]
        size = header[4:] + struct.pack(">I", zlib.crc32(header))
    elif content.startswith(b"GIF"):
        place, size = 6, struct.pack("<HH", width, height)
    elif content.startswith(b"BM"):
        place, size = 18, struct.pack("<ii", width, height)
    else:
        assert content.startswith(b"P6\n37 29\n")
        return content.replace(b"37 29", b"%d %d" % (width, height), 1)
    return content[:place] + size + content[place + len(size) :]


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        JPEGS["baseline"],
        JPEGS["progressive"],
        JPEGS["grey"],
        JPEGS["fill bytes"],
        # A marker that is no segment: what follows is not its length.
        JPEGS["baseline"].replace(b"\xff\xdb", b"\xff\xd0\xff\xdb", 1),
        OTHERS["PNG"],
        encoded(picture().quantize(20), "GIF"),
        OTHERS["BMP"],
        OTHERS["PPM"],
    ],
    ids=["JPEG", "progressive", "grey", "fill bytes", "bare marker", "PNG", "GIF", "BMP", "PPM"],
)
def test_a_bomb_is_refused_before_it_is_decoded(
    tmp_path: Path, content: bytes, upright: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(claiming(content, 30000, 29999))
    for module, name in ((classification, "_decode_jpeg"), (Image.Image, "convert")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("decoded"))  # type: ignore[arg-type]
    with pytest.raises(UnreadableImageError) as raised:
        read_image(path, upright=upright)
    assert str(raised.value) == (
        f"{path} is not a readable image: it is 30,000 × 29,999 pixels large, and at most 178,956,970 are "
        "read: scale it down"
    )


def test_a_large_image_is_read_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limit of PIL is, which stays as it was."""
    pixels = 29 * 37
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for content in (JPEGS["baseline"], OTHERS["PNG"]):
        monkeypatch.setattr(classification, "MOST_PIXELS", pixels)
        assert isinstance(decoded(tmp_path, content), Tensor)
        monkeypatch.setattr(classification, "MOST_PIXELS", pixels - 1)
        assert "it is 37 × 29 pixels large, and at most 1,072 are read" in str(decoded(tmp_path, content))
    assert Image.MAX_IMAGE_PIXELS == 10


def test_no_warning_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest sets aside what the module has filtered: it is executed anew, with all warnings shown."""
    spec = importlib.util.spec_from_file_location("fresh", classification.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fresh", fresh)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 29 * 37 - 1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        spec.loader.exec_module(fresh)
        for content in (JPEGS | OTHERS).values():
            (tmp_path / "image").write_bytes(content)
            fresh.read_image(tmp_path / "image")
    assert [str(warning.message) for warning in seen] == []
