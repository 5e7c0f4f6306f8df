"""`polynl explain`: explanations and figures, of networks from checkpoints and by name."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explaining import KINDS, drawn, explain, stir
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from polynl.data.images import read_image
from polynl.explain import detection_score, feature_norms, grad_cam, influence_map
from polynl.explain.explanation import Explanation, Query, class_number, explain_image
from polynl.explain.networks import (
    network_by_name,
    network_from_checkpoint,
    networks_from_checkpoints,
)
from polynl.explain.run import move_networks, run_explain
from polynl.train.recipe_file import load_recipe, to_yaml

TESTS = Path(__file__).parent.parent
# Untrained detectors have low scores; keep them all.
UNSURE = {
    "instances": ["--model.detector-options.box_score_thresh", "0"],
    "faces": ["--model.detector-options.score_thresh", "0"],
}


def make_run(folder: Path, recipe: str | Path, *keys: str) -> Path:
    """Make the folder of a run that has not trained; returns its weights."""
    folder.mkdir(parents=True)
    settings = load_recipe(recipe, keys)
    torch.manual_seed(0)
    task = settings.build_task()
    save_file(stir(task.model()).state_dict(), folder / "best.safetensors")
    (folder / "recipe.yaml").write_text(to_yaml(settings))
    (folder / "labels.json").write_text(json.dumps(task.labels()))
    return folder / "best.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    small = ("--model.arch_options", "{depth: 1, width: 4}")
    blocks = ("none", "poly_nl", "non_local", "tesa")
    classifiers = {name: ("scenes", "--model.block", name, *small) for name in blocks}
    detectors = {kind: (TESTS / f"tiny_{kind}.yaml", *words) for kind, words in UNSURE.items()}
    return {name: make_run(folder / name, *given) for name, given in (classifiers | detectors).items()}


# Pictures


def test_networks_side_by_side(runs: dict[str, Path], images: Path, tmp_path: Path, capsys: Any) -> None:
    words = [word for name in ("none", "poly_nl", "tesa") for word in ("--checkpoint", runs[name])]
    code, out, err = explain(capsys, images, *words, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert drawn(tmp_path / "out") == {f"{name}-{kind}.png" for name in "ab" for kind in KINDS}
    assert f"{images / 'a.png'}: none: " in out
    assert "TESA has no influence maps" in out
    widths = {}
    for kind in KINDS:
        with Image.open(tmp_path / "out" / f"b-{kind}.png") as picture:
            assert np.asarray(picture.convert("L")).std() > 10, "something is to be seen"
            widths[kind] = picture.width
    assert widths["grad_cam"] > 1.6 * widths["influence"], "four panels, and two"


def test_explanations_are_those_of_the_functions(runs: dict[str, Path], images: Path, tmp_path: Path) -> None:
    network = network_from_checkpoint(runs["poly_nl"])
    query = Query(position=(12.0, 30.0))
    console = Console(quiet=True)
    ((found,),) = run_explain([images / "a.png"], [network], query, tmp_path, console)
    x = network.inputs(read_image(images / "a.png"))
    number = int(network.model(x).argmax())
    assert found.said.startswith(f"{network.labels[number]}, ")
    assert torch.equal(found.cam, grad_cam(network.model, x, number)[0])
    for ours, expected in zip(found.norms, feature_norms(network.model, x), strict=True):
        assert torch.equal(ours, expected[0])
    assert found.norms.y.any()
    assert found.spot == (12.5, 30.5), "the middle of the pixel"
    assert torch.equal(found.shares, influence_map(network.model, x, (12.5, 30.5))[0])


@pytest.mark.parametrize("kind", ["none", "poly_nl", "tesa", "instances", "faces"])
def test_a_network_runs_twice_per_image(
    kind: str, runs: dict[str, Path], images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once to record everything without gradients, once for the gradient of Grad-CAM."""
    if kind != "poly_nl":  # drawing takes long, and is the same for all
        monkeypatch.setattr("polynl.explain.run.FIGURES", {})
    network = network_from_checkpoint(runs[kind])
    passes: list[bool] = []
    network.model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    ((found,),) = run_explain([images / "b.jpg"], [network], Query(), tmp_path, Console(quiet=True))
    assert found.cam is not None
    assert (found.norms is None) == (kind == "none")
    assert passes == [False, True]


def test_the_place_is_where_grad_cam_is_highest(runs: dict[str, Path], images: Path) -> None:
    found = explain_image(network_from_checkpoint(runs["poly_nl"]), read_image(images / "a.png"), Query())
    assert found.cam.max() > 0
    row, column = (int(c * size / 40) for c, size in zip(reversed(found.spot), found.cam.shape, strict=True))
    assert found.cam[row, column] == found.cam.max()


def test_a_class_by_name_or_number(runs: dict[str, Path], images: Path) -> None:
    network, image = network_from_checkpoint(runs["none"]), read_image(images / "a.png")
    last = len(network.labels) - 1
    cams = [
        explain_image(network, image, Query(target=t)).cam for t in (network.labels[last].upper(), str(last))
    ]
    assert torch.equal(*cams)
    assert torch.equal(cams[0], grad_cam(network.model, network.inputs(image), last)[0])
    assert class_number("tabby CAT", {0: "a", 1: "Tabby cat"}) == 1
    assert class_number("2", {2: "10", 4: "2"}) == 4, "names come first"
    with pytest.raises(ValueError, match=r"--target: 2 classes are called 'crane'; give a number: 1 or 5"):
        class_number("crane", {1: "crane", 3: "a", 5: "Crane"})
    with pytest.raises(ValueError, match=r"no class is called 'dog'. Its classes are crane, heron."):
        class_number("dog", {0: "crane", 1: "heron"})


def test_without_a_grad_cam_the_place_is_the_middle(runs: dict[str, Path]) -> None:
    network = network_from_checkpoint(runs["poly_nl"])
    torch.nn.init.zeros_(network.model.get_parameter("fc.weight"))
    found = explain_image(network, torch.zeros(3, 40, 40, dtype=torch.uint8), Query())
    assert not found.cam.any()
    assert found.spot == (20, 20)


def test_several_blocks_are_told_apart() -> None:
    network = network_by_name("torchvision/resnet18", None, ["poly_nl@layer2.1", "poly_nl@layer3.1"])
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    found = explain_image(network, image, Query(block="layer3.1"))
    assert found.title == "resnet18 + poly_nl@layer2.1 + poly_nl@layer3.1, layer3.1.polynl_before"
    assert found.norms.x.shape == (14, 14)


def test_only_detectors_refuse_thin_images(runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    Image.new("RGB", (2000, 20)).save(tmp_path / "thin.png")
    code, *_ = explain(capsys, tmp_path / "thin.png", "--checkpoint", runs["none"], "--out", tmp_path / "out")
    assert (code, drawn(tmp_path / "out")) == (0, {"thin-grad_cam.png"})
    words = ["--checkpoint", runs["none"], "--checkpoint", runs["faces"], "--out", tmp_path / "out"]
    code, out, _ = explain(capsys, tmp_path / "thin.png", *words)
    assert code == 1
    assert "more than 50 times as long as thin" in out


def test_a_full_disk_is_told_in_a_line(
    runs: dict[str, Path], images: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = explain(capsys, images / "a.png", "--checkpoint", runs["none"], "--out", tmp_path)
    assert (code, drawn(tmp_path)) == (1, set())
    assert err == f"polynl: {tmp_path / 'a-grad_cam.png'}: No space left on device.\n"


@pytest.mark.parametrize("kind", ["instances", "faces"])
def test_a_detection_of_a_detector_is_explained(
    kind: str, runs: dict[str, Path], images: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ["--checkpoint", runs[kind], "--detection", 1, "--out", tmp_path]
    code, out, err = explain(capsys, images / "b.jpg", *words)
    assert (code, err) == (0, "")
    assert drawn(tmp_path) == {f"b-{name}.png" for name in KINDS}
    network, image = network_from_checkpoint(runs[kind]), read_image(images / "b.jpg")
    with torch.no_grad():
        (expected,) = network.model([image / 255])
    name = network.labels[int(expected["labels"][1])]
    assert f": {name}, {100 * expected['scores'][1]:.0f}%" in out
    found = explain_image(network, image, Query(detection=1))
    assert found.box == pytest.approx(expected["boxes"][1].tolist())
    assert torch.equal(found.cam, grad_cam(network.model, [image / 255], detection_score(1))[0])
    shares = influence_map(network.model, [image / 255], found.box)[0]
    assert torch.equal(found.shares, shares)
    elsewhere = explain_image(network, image, Query(detection=1, position=(3, 4)))
    assert (elsewhere.box, elsewhere.spot) == (found.box, (3.5, 4.5)), "still about the detection"


def test_a_detector_that_finds_nothing(
    runs: dict[str, Path], images: Path, tmp_path: Path, capsys: Any
) -> None:
    strict = ["--model.detector-options.box_score_thresh", 1]
    words = [images / "a.png", "--checkpoint", runs["instances"], *strict, "--out", tmp_path]
    code, out, _ = explain(capsys, *words)
    assert (code, drawn(tmp_path)) == (0, {"a-features.png"}), "its block still adds"
    assert "instances: nothing found" in out
    code, *_ = explain(capsys, *words, "--position", 3, 4)
    assert (code, drawn(tmp_path)) == (0, {"a-features.png", "a-influence.png"})


def test_a_new_block_adds_nothing(images: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--model", "torchvision/resnet18", "--insert", "poly_nl@layer3.1", "--out", tmp_path]
    code, out, err = explain(capsys, images / "a.png", *words)
    assert (code, err) == (0, "")
    assert "resnet18 + poly_nl@layer3.1 (random weights): load others with --weights FILE." in out
    assert "added by its block: nothing, the block is new or untrained" in out
    assert drawn(tmp_path) == {f"a-{kind}.png" for kind in KINDS}


def test_runs_of_one_name_are_told_apart(runs: dict[str, Path], tmp_path: Path) -> None:
    other = make_run(
        tmp_path / "none", "scenes", "--model.block", "none", "--model.arch_options", "{depth: 1, width: 4}"
    )
    names = [
        network.name
        for network in networks_from_checkpoints([runs["none"], runs["poly_nl"], other], None, (), ())
    ]
    assert names[1] == "poly_nl"
    assert names[0] == f"{runs['none'].parent.parent.name}/none/best.safetensors"
    assert names[2] == f"{tmp_path.name}/none/best.safetensors"


# Mistakes


Words = Callable[[dict[str, Path], Path, Path], list[object]]
RESNET = ("--model", "torchvision/resnet18")
MISTAKES: dict[str, tuple[Words, str]] = {
    "no images": (lambda r, i, t: [], "specify images: polynl explain IMAGE …"),
    "neither checkpoint nor model": (lambda r, i, t: [i], "--checkpoint FILE or --model LIBRARY/NAME."),
    "no such image": (lambda r, i, t: [i / "aa.png", *RESNET], "aa.png. Did you mean a.png"),
    "no such folder": (lambda r, i, t: [i / "in" / "aa.png", *RESNET], "there is no image"),
    "not an image": (lambda r, i, t: [r["none"], *RESNET], "1 of 1 images could not be read"),
    "a mistyped option": (lambda r, i, t: [i, *RESNET, "--positoin", 3], "Did you mean --position"),
    "no checkpoint": (lambda r, i, t: [i, "--checkpoint", t / "x.pt"], "--checkpoint: no such file"),
    "no recipe": (lambda r, i, t: [i, "--checkpoint", i / "a.png"], "there is no recipe.yaml next to"),
    "another model": (
        lambda r, i, t: [i, "--checkpoint", r["poly_nl"], "--recipe", "scenes", "--model.block", "tesa"],
        "best.safetensors' does not fit the SmallResNet, missing: ",
    ),
    "another model by name": (
        lambda r, i, t: [i, *RESNET, "--weights", r["none"]],
        "best.safetensors' does not fit the ResNet, missing: ",
    ),
    "no weights": (lambda r, i, t: [i, *RESNET, "--weights", t / "x"], "x cannot be read: No such file"),
    "too few weights": (
        lambda r, i, t: [i, *RESNET, *RESNET, "--weights", r["none"]],
        "1 --weights for 2 networks: specify one for every --model",
    ),
    "weights alone": (lambda r, i, t: [i, "--checkpoint", r["none"], "--weights", "x"], "need --model"),
    "no library": (lambda r, i, t: [i, "--model", "resnet18"], "expected torchvision/NAME or timm/NAME"),
    "no network": (lambda r, i, t: [i, "--model", "torchvision/resnet181"], "Did you mean resnet18"),
    "no network of timm": (lambda r, i, t: [i, "--model", "timm/resnet181"], "Did you mean resnet18"),
    "no classifier": (
        lambda r, i, t: [i, "--model", "torchvision/raft_small"],
        "torchvision's raft_small is neither a classifier nor a detector",
    ),
    "strides of no bottlenecks": (
        lambda r, i, t: [i, "--model", "torchvision/resnet18", "--stride-in-1x1"],
        "--stride-in-1x1: ",
    ),
    "an insertion without a place": (lambda r, i, t: [i, *RESNET, "--insert", "poly_nl"], "expected BLOCK@"),
    "an insertion at no module": (
        lambda r, i, t: [i, *RESNET, "--insert", "poly_nl@layer3.7"],
        "has no module 'layer3.7'",
    ),
    "an insertion of no block": (
        lambda r, i, t: [i, *RESNET, "--insert", "polynl@layer3.1"],
        "Did you mean poly_nl",
    ),
    "a block that is not in it": (
        lambda r, i, t: [i, "--checkpoint", r["poly_nl"], "--block", "layer2.0"],
        "poly_nl: no block is called 'layer2.0'. Did you mean layer3.0? Available: layer3.0.polynl_before",
    ),
    "a block where there is none": (
        lambda r, i, t: [i, "--checkpoint", r["none"], "--block", "layer2.0"],
        "--block layer2.0: there is no block in none.",
    ),
    "a place outside": (
        lambda r, i, t: [i / "a.png", *RESNET, "--position", 40, 3],
        "--position 40 3 is outside the image, which is 40 wide and 40 high.",
    ),
    "a place that is cut off": (
        lambda r, i, t: [i / "b.jpg", *RESNET, "--position", 3, 2],
        "--position 3 2 is in a border of the image that resnet18 (random weights) crops.",
    ),
    "no class": (lambda r, i, t: [i, *RESNET, "--target", "tabbi"], "Did you mean tabby"),
    "a class too many": (lambda r, i, t: [i, *RESNET, "--target", 1000], "there is no class 1000"),
    "no layer": (lambda r, i, t: [i, *RESNET, "--layer", "layer5"], "ResNet has no module 'layer5'"),
    "a layer without a map": (lambda r, i, t: [i, *RESNET, "--layer", "fc"], 'layer "fc" outputs (1, 1000)'),
    "a class of a detector": (
        lambda r, i, t: [i, "--checkpoint", r["faces"], "--target", "cat"],
        "--target cat is for classifiers; use --detection for faces.",
    ),
    "a detection of a classifier": (
        lambda r, i, t: [i, *RESNET, "--detection", 0],
        "--detection 0 is for detectors; use --target for resnet18 (random weights).",
    ),
    "a place outside one of several images": (
        lambda r, i, t: [i, "--checkpoint", r["none"], "--position", 50, 50],
        "a.png: --position 50 50 is outside the image, which is 40 wide and 40 high.",
    ),
    "a mistyped checkpoint": (
        lambda r, i, t: [i, "--chekpoint", r["none"]],
        "Did you mean --checkpoint",
    ),
    "no detection": (
        lambda r, i, t: [i, "--checkpoint", r["instances"], "--detection", 99],
        "--detection 99: there are ",
    ),
    "a detection before the first": (
        lambda r, i, t: [i, "--checkpoint", r["faces"], "--detection", -1],
        "--detection -1: there are ",
    ),
    "pictures over images": (
        lambda r, i, t: [t / "a-grad_cam.png", t / "a", *RESNET, "--out", t],
        "a-grad_cam.png is one of the images; choose a folder",
    ),
    "a file for a folder": (lambda r, i, t: [i, *RESNET, "--out", i / "a.png"], "a.png is a file"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_line(
    case: str, runs: dict[str, Path], images: Path, tmp_path: Path, capsys: Any
) -> None:
    for name in ("a", "a-grad_cam.png"):
        (tmp_path / name).write_bytes((images / "a.png").read_bytes())
    words, expected = MISTAKES[case]
    given = words(runs, images, tmp_path)
    out = [] if "--out" in given else ["--out", tmp_path / "out"] if given else []
    code, _, err = explain(capsys, *given, *out)
    assert code == (1 if case == "not an image" else 2)
    assert expected in err
    assert len(err.splitlines()) == 1


def test_a_mistyped_key_may_mean_an_option(
    runs: dict[str, Path], images: Path, tmp_path: Path, capsys: Any
) -> None:
    words = [images, "--checkpoint", runs["none"], "--out", tmp_path]
    code, _, err = explain(capsys, *words, "--taget", 3)
    assert code == 2
    assert "taget: there is no such key. Did you mean target" in err


def test_unreadable_images_do_not_keep_the_others_from_being_drawn(
    runs: dict[str, Path], images: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    words = [tmp_path / "empty.png", images / "a.png", "--checkpoint", runs["none"]]
    code, out, err = explain(capsys, *words, "--out", tmp_path / "out")
    assert code == 1
    assert "skipped: " in out
    assert "1 of 2 images could not be read" in err
    assert drawn(tmp_path / "out") == {"a-grad_cam.png"}


def test_a_gpu_that_is_not_there(runs: dict[str, Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"--device cuda: no CUDA device is available\."):
        move_networks([network_from_checkpoint(runs["none"])], "cuda")


def test_the_prediction_is_kept_in_parts_and_said_as_text(runs: dict[str, Path]) -> None:
    network = network_from_checkpoint(runs["none"])
    found = Explanation(network, torch.zeros(3, 2, 2), "disc", 0.976)
    assert (found.label, found.probability, found.said) == ("disc", 0.976, "disc, 98%")
    nothing = Explanation(network, torch.zeros(3, 2, 2), spot=(1, 2))
    assert (nothing.label, nothing.probability, nothing.box) == (None, None, None)
    assert nothing.said == "nothing found"
