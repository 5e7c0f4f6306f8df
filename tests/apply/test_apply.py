"""`polynl apply`: what a network gives for a large image in tiles is what it gives for the whole of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from PIL import Image
from safetensors.torch import save_file

from polynl.apply import large
from polynl.explain.influence import influence
from polynl.explain.networks import ExplainedNetwork, network_from_checkpoint
from polynl.train.recipe_file import load_recipe, to_yaml

TINY = Path(__file__).parents[1] / "train" / "tiny.yaml"
NAMES = ["ant", "bee", "cat", "dog", "eel", "fox"]
HEIGHT, WIDTH = 131, 97
BLOCK = "layer3.0.polynl_before"


def saved_run(folder: Path, **model: Any) -> Path:
    """A run that has not trained, with a block that adds something."""
    torch.manual_seed(0)
    labels = dict(enumerate(NAMES))
    recipe = load_recipe(TINY, [word for key, value in model.items() for word in (f"--model.{key}", value)])
    network = recipe.build_task(labels).model()
    for name, parameter in network.named_parameters():
        if "polynl" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_file(network.state_dict(), folder / "best.safetensors")
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    (folder / "labels.json").write_text(json.dumps(labels))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def network(folder: Path) -> ExplainedNetwork:
    return network_from_checkpoint(folder / "best.safetensors")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


@pytest.fixture
def image(tmp_path: Path, pixels: np.ndarray) -> Path:
    np.save(tmp_path / "slide.npy", pixels)
    return tmp_path / "slide.npy"


def whole(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def apply(capsys: Any, *words: object) -> tuple[int, str, str]:
    return run(capsys, "apply", *words, "--tile", 48)


@pytest.mark.parametrize("keep", [[], ["--keep"]])
def test_classes_are_those_of_the_whole_image_in_its_own_size(
    folder: Path,
    network: ExplainedNetwork,
    image: Path,
    pixels: np.ndarray,
    tmp_path: Path,
    capsys: Any,
    keep: Any,
) -> None:
    out = tmp_path / "out"
    code, shown, err = apply(capsys, image, "--checkpoint", folder, "--top", 2, "--out", out, *keep)
    assert code == 0, err
    assert "tiles of 48 × 48 pixels" in err
    with torch.no_grad():
        probabilities = network.model(network.inputs(whole(pixels))).softmax(1)[0]
    values, numbers = probabilities.topk(2)
    (found,) = json.loads((out / "predictions.json").read_text())["images"]
    assert found["file_name"] == str(image)
    assert [guess["name"] for guess in found["predictions"]] == [NAMES[i] for i in numbers.tolist()]
    assert [guess["probability"] for guess in found["predictions"]] == pytest.approx(
        values.tolist(), rel=1e-5
    )
    assert f"{image}: {NAMES[numbers[0]]} " in shown
    assert {file.name for file in out.iterdir()} == {"predictions.csv", "predictions.json"}


def test_features_of_a_module(
    folder: Path, network: ExplainedNetwork, image: Path, pixels: np.ndarray, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    code, shown, err = apply(capsys, image, "--checkpoint", folder, "--features", "layer3", "--out", out)
    assert code == 0, err
    with torch.no_grad():
        expected = network.model.features(network.inputs(whole(pixels)))
    found = np.load(out / "slide-layer3.npy")
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(expected.abs().max()))
    assert "slide-layer3.npy has the output of layer3, 1 × 32 × 33 × 25" in shown
    assert [file.name for file in out.iterdir()] == ["slide-layer3.npy"]


def influence_at_once(network: ExplainedNetwork, pixels: np.ndarray, place: tuple[int, int]) -> torch.Tensor:
    seen = []
    block = network.model.get_submodule(BLOCK)
    with block.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        network.model(network.inputs(whole(pixels)))
    return influence(block, seen[0], place)[0]


@pytest.mark.parametrize("chunk", [1, 2**24])
def test_influence_on_a_pixel(
    folder: Path,
    network: ExplainedNetwork,
    image: Path,
    pixels: np.ndarray,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
    chunk: int,
) -> None:
    monkeypatch.setattr(large, "CHUNK", chunk)
    out = tmp_path / "out"
    words = [image, "--checkpoint", folder, "--influence", 50, 100, "--block", "layer3.0", "--out", out]
    code, shown, err = apply(capsys, *words)
    assert code == 0, err
    expected = influence_at_once(network, pixels, (100 * 33 // HEIGHT, 50 * 25 // WIDTH))
    found = np.load(out / "slide-influence.npy")
    assert found.sum() == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "slide-influence.npy and slide-influence.png have the influence map" in shown
    with Image.open(out / "slide-influence.png") as picture:
        assert min(picture.size) > 300
    assert {file.name for file in out.iterdir()} == {"slide-influence.npy", "slide-influence.png"}


def test_keys_that_are_sub_sampled_are_cut_between_windows(
    tmp_path: Path, image: Path, pixels: np.ndarray, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(large, "CHUNK", 1)
    options = "{mode: dot_product, sub_sample: after, pool_size: 4}"
    run_folder = saved_run(tmp_path, block="non_local", options=options)
    words = [image, "--checkpoint", run_folder, "--influence", 0, 0, "--out", tmp_path / "out"]
    code, _, err = apply(capsys, *words)
    assert code == 0, err
    expected = influence_at_once(network_from_checkpoint(run_folder / "best.safetensors"), pixels, (0, 0))
    assert expected.shape == (33 // 4, 25 // 4)
    np.testing.assert_allclose(np.load(tmp_path / "out" / "slide-influence.npy"), expected, atol=1e-5)


def test_unreadable_images_are_skipped(folder: Path, image: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "broken.npy").write_bytes(image.read_bytes()[:-1000])
    Image.fromarray(np.load(image)).save(tmp_path / "same.png")
    code, shown, err = apply(capsys, tmp_path, "--checkpoint", folder, "--out", tmp_path / "out")
    assert code == 1
    assert f"skipped: {tmp_path / 'broken.npy'} is not a readable image: " in shown
    assert "1 of 3 images could not be read, see above." in err
    first, second = json.loads((tmp_path / "out" / "predictions.json").read_text())["images"]
    assert (Path(first["file_name"]).name, Path(second["file_name"]).name) == ("same.png", "slide.npy")
    assert first["predictions"] == second["predictions"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--features", "layer9"], "no module 'layer9'. Did you mean layer"),
        (["--block", "layer3.0"], "--block layer3.0 needs --influence X Y."),
        (["--influence", 500, 0], "position 500, 0 is outside the image, which is 97 wide and 131 high."),
        (["--influence", 0, 0, "--block", "layer2"], "no block is called 'layer2'"),
        (["--tile", 2], "slide.npy: tile=2 is smaller than the halo of"),
        (["--top", 0], "--top 0: expected a number above 0."),
        (["--tyle", 48], "tyle"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    folder: Path, image: Path, tmp_path: Path, capsys: Any, words: list[Any], message: str
) -> None:
    out = tmp_path / "out"
    code, _, err = run(capsys, "apply", image, "--checkpoint", folder, "--tile", 48, "--out", out, *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert not out.exists()


def test_no_image_is_overwritten(folder: Path, pixels: np.ndarray, tmp_path: Path, capsys: Any) -> None:
    for name in ("slide.npy", "slide-layer3.npy"):
        np.save(tmp_path / name, pixels)
    words = [tmp_path, "--checkpoint", folder, "--features", "layer3", "--out", tmp_path]
    code, _, err = apply(capsys, *words)
    assert code == 2
    assert "slide-layer3.npy is one of the images" in err


def test_a_block_without_influence_maps_is_named(tmp_path: Path, image: Path, capsys: Any) -> None:
    run_folder = saved_run(tmp_path, block="se")
    words = [image, "--checkpoint", run_folder, "--influence", 0, 0, "--out", tmp_path / "out"]
    code, _, err = apply(capsys, *words)
    assert code == 2
    assert "SqueezeExcite has no influence maps" in err
