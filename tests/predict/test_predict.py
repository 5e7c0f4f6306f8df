"""`polynl predict`: detections in pictures, and the same in a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from safetensors.torch import load_file, save_file
from torch import Tensor

from polynl.data.images import read_image
from polynl.predict.drawing import COLOURS, draw_detections
from polynl.tasks.instance_segmentation.model import mask_rcnn
from polynl.tasks.instance_segmentation.task import InstanceSegmentation
from polynl.train.recipe_file import load_recipe, to_yaml

TINY = Path(__file__).parent.parent / "tiny_instances.yaml"
# An untrained detector has low scores; keep them all.
UNSURE = ["--model.detector-options.box_score_thresh", "0"]
NAMES = {"1": "cat", "2": "dog", "5": "tree"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has not trained."""
    folder = tmp_path_factory.mktemp("run")
    recipe = load_recipe(TINY, UNSURE)
    torch.manual_seed(0)
    model = recipe.build_task({int(number): name for number, name in NAMES.items()}).model()
    save_file(model.state_dict(), folder / "best.safetensors")
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    (folder / "labels.json").write_text(json.dumps(NAMES))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for name, shape in (("a.png", (40, 64, 3)), ("b.jpg", (90, 50, 3))):
        Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)).save(folder / name)
    return folder


def predict(capsys: Any, out: Path, *words: object) -> tuple[int, str, str]:
    return run(capsys, "predict", *words, "--out", out)


def test_pictures_and_a_file_in_cocos_format(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    words = [images, "--checkpoint", folder / "best.safetensors", "--threshold", 0]
    code, shown, _ = predict(capsys, tmp_path / "out", *words)
    assert code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a.png", "b.png", "detections.json"}
    assert f"{images / 'a.png'}: " in shown
    assert f"Pictures and detections.json are in {tmp_path / 'out'}." in shown
    coco = COCO(tmp_path / "out" / "detections.json")
    assert {entry["id"]: entry["name"] for entry in coco.loadCats(coco.getCatIds())} == {
        int(number): name for number, name in NAMES.items()
    }
    task = load_recipe(folder / "recipe.yaml").build_task({1: "cat", 2: "dog", 5: "tree"})
    assert isinstance(task, InstanceSegmentation)
    model = task.model().eval()
    from polynl.models.weights import load_weights

    load_weights(model, folder / "best.safetensors")
    for number, name in ((1, "a.png"), (2, "b.jpg")):
        image = read_image(images / name)
        with torch.no_grad():
            (found,) = task.detect(model, [image])
        entries = coco.loadAnns(coco.getAnnIds([number]))
        known = [place for place, label in enumerate(found.labels.tolist()) if str(label) in NAMES]
        assert len(entries) == len(known) > 0
        for entry, place in zip(entries, known, strict=True):
            left, top, right, bottom = found.boxes[place].tolist()
            assert entry["bbox"] == pytest.approx([left, top, right - left, bottom - top], abs=1e-3)
            assert entry["category"] == NAMES[str(entry["category_id"])]
            mask = torch.from_numpy(coco_mask.decode(entry["segmentation"])).bool()
            assert torch.equal(mask, found.masks[place])
        with Image.open(tmp_path / "out" / f"{Path(name).stem}.png") as picture:
            assert min(picture.size) == 480
            assert picture.size[0] * image.shape[1] == pytest.approx(
                picture.size[1] * image.shape[2], rel=0.01
            )


def test_weights_that_are_not_finite_are_not_drawn(
    folder: Path, images: Path, tmp_path: Path, capsys: Any
) -> None:
    for name in ("recipe.yaml", "labels.json"):
        shutil.copy(folder / name, tmp_path / name)
    state = load_file(folder / "best.safetensors")
    state["backbone.body.conv1.weight"][0] = torch.nan
    save_file(state, tmp_path / "best.safetensors")
    words = [images, "--checkpoint", tmp_path / "best.safetensors"]
    code, shown, err = predict(capsys, tmp_path / "out", *words)
    assert (code, shown) == (2, "")
    assert f"{tmp_path}/best.safetensors' has NaN or infinite values in 1 of its" in err
    assert "first in backbone.body.conv1.weight" in err
    assert not (tmp_path / "out").exists()


def test_only_detections_above_the_threshold(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    words = [images / "a.png", "--checkpoint", folder / "best.safetensors", "--threshold"]
    counts = []
    for threshold in ("0", "0.17", "1"):
        code, shown, _ = predict(capsys, tmp_path, *words, threshold)
        entries = json.loads((tmp_path / "detections.json").read_text())["annotations"]
        assert code == 0
        assert all(entry["score"] >= float(threshold) for entry in entries)
        assert (f"nothing above {threshold}; the highest score is 0." in shown) == (not entries)
        counts.append(len(entries))
    assert counts[0] > counts[2] == 0
    picture = read_image(tmp_path / "a.png")
    image = read_image(images / "a.png")
    assert torch.equal(picture, draw_detections(image, torch.zeros(0, 4), []))


def test_keys_of_the_recipe(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    words = [images / "a.png", "--checkpoint", folder / "best.safetensors", "--threshold", "0"]
    found = []
    for most in (3, 1):
        code, _, err = predict(
            capsys, tmp_path, *words, "--model.detector-options.box_detections_per_img", most
        )
        assert code == 0, err
        found.append(len(json.loads((tmp_path / "detections.json").read_text())["annotations"]))
    assert found[0] <= 3
    assert found[1] <= 1


def test_images_of_one_name(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(images, tmp_path / "others")
    words = [images / "a.png", tmp_path / "others", "--checkpoint", folder / "best.safetensors"]
    assert predict(capsys, tmp_path / "out", *words)[0] == 0
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {"a.png", "a_2.png", "b.png"}


def test_a_file_that_is_not_an_image(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "c.png").write_text("hello")
    words = [tmp_path / "c.png", images / "a.png", "--checkpoint", folder / "best.safetensors"]
    code, shown, err = predict(capsys, tmp_path / "out", *words)
    assert code == 1
    assert f"skipped: {tmp_path / 'c.png'} is not a readable image: it has no known format" in shown
    assert "polynl: 1 of 2 images could not be read, see above." in err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a.png", "detections.json"}


def test_weights_without_a_run_are_torchvisions(images: Path, tmp_path: Path, capsys: Any) -> None:
    options: dict[str, Any] = {"fpn_channels": 16, "box_width": 16, "mask_widths": (8,)}
    torch.manual_seed(0)
    model = mask_rcnn("resnet18", num_classes=91, **options)
    torch.save(model.state_dict(), tmp_path / "coco.pth")
    words = [images / "a.png", "--checkpoint", tmp_path / "coco.pth", "--threshold", "0"]
    code, _, err = predict(capsys, tmp_path / "out", *words)
    assert code == 2
    assert f"there is no recipe.yaml next to {tmp_path / 'coco.pth'}: name the recipe" in err
    words += [
        "--recipe",
        "coco",
        "--model.block",
        "none",
        "--model.arch",
        "resnet18",
        "--model.mask-widths",
        "[8]",
    ]
    words += ["--model.fpn-channels", 16, "--model.box-width", 16, "--model.min-size", 64, *UNSURE]
    code, _, err = predict(capsys, tmp_path / "out", *words)
    assert code == 0, err
    content = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert content["categories"][0] == {"id": 1, "name": "person"}
    assert len(content["categories"]) == 90
    assert content["annotations"]


def mistaken(folder: Path, images: Path, tmp_path: Path) -> dict[str, tuple[list[Any], str]]:
    checkpoint = ["--checkpoint", folder / "best.safetensors"]
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "labels.json").write_text('{"1": "cat", "3": "dog"}')
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "labels.json").write_text('["cat"]')
    (tmp_path / "empty").mkdir()
    return {
        "no image": (
            [images / "aa.png", *checkpoint],
            f"no image {images / 'aa.png'}. Did you mean a.png",
        ),
        "no images": (
            checkpoint,
            "the images must come first, not --checkpoint: polynl predict IMAGE … [--key value …]",
        ),
        "empty folder": ([tmp_path / "empty", *checkpoint], f"no image in the folder {tmp_path / 'empty'}."),
        "threshold": (
            [images, *checkpoint, "--threshold", 50],
            "--threshold 50: expected a number from 0 to 1",
        ),
        "no checkpoint": (
            [images, "--checkpoint", folder / "x.pt"],
            f"--checkpoint: no such file: {folder}",
        ),
        "another task": (
            [images, *checkpoint, "--recipe", "scenes"],
            "Check that task, block and classes are those it was trained with",
        ),
        "other labels": (
            [images, "--checkpoint", other / "best.safetensors"],
            "Check that task, block and classes are those it was trained with",
        ),
        "damaged labels": (
            [images, "--checkpoint", damaged / "best.safetensors"],
            f"{damaged / 'labels.json'} is not a JSON object of names by number",
        ),
        "a key": (
            [images, *checkpoint, "--treshold", 1],
            "treshold: there is no such key. Did you mean",
        ),
    }


CASES = (
    "no image",
    "no images",
    "empty folder",
    "threshold",
    "no checkpoint",
    "another task",
    "other labels",
)


@pytest.mark.parametrize("case", [*CASES, "damaged labels", "a key"])
def test_mistakes(case: str, folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    words, expected = mistaken(folder, images, tmp_path)[case]
    code, _, err = predict(capsys, tmp_path / "out", *words)
    assert code == 2
    assert expected in err
    assert not (tmp_path / "out").exists()


def test_the_folder_is_a_file(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").write_text("mine")
    code, _, err = predict(capsys, tmp_path / "out", images, "--checkpoint", folder / "best.safetensors")
    assert code == 2
    assert "is a file; expected a folder." in err
    assert (tmp_path / "out").read_text() == "mine"


def test_images_are_not_replaced_by_their_pictures(
    folder: Path, images: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(images, tmp_path / "mine")
    before = (tmp_path / "mine" / "a.png").read_bytes()
    code, _, err = predict(
        capsys, tmp_path / "mine", tmp_path / "mine", "--checkpoint", folder / "best.safetensors"
    )
    assert code == 2
    assert f"--out: {tmp_path / 'mine' / 'a.png'} is one of the images; choose a folder" in err
    assert (tmp_path / "mine" / "a.png").read_bytes() == before


def test_a_thin_image_is_skipped(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    Image.new("RGB", (600, 4)).save(tmp_path / "thin.png")
    words = [tmp_path / "thin.png", images / "a.png", "--checkpoint", folder / "best.safetensors"]
    code, shown, _ = predict(capsys, tmp_path / "out", *words)
    assert code == 1
    assert "thin.png is 600 wide and 4 high, more than 50 times as long as thin" in shown
    assert (tmp_path / "out" / "detections.json").is_file()


def test_photos_are_turned_upright(folder: Path, tmp_path: Path, capsys: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    Image.new("RGB", (90, 60), "red").save(tmp_path / "photo.jpg", exif=exif)
    words = [tmp_path / "photo.jpg", "--checkpoint", folder / "best.safetensors"]
    assert predict(capsys, tmp_path / "out", *words)[0] == 0
    (entry,) = json.loads((tmp_path / "out" / "detections.json").read_text())["images"]
    assert (entry["width"], entry["height"]) == (60, 90)


def test_a_folder_that_cannot_be_written_to(folder: Path, images: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = predict(
        capsys, tmp_path / "file" / "out", images, "--checkpoint", folder / "best.safetensors"
    )
    assert code == 2
    assert "--out: " in err
    assert "cannot be written to: Not a directory." in err


def test_torchrun_is_refused(
    folder: Path, images: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = predict(capsys, tmp_path, images, "--checkpoint", folder / "best.safetensors")
    assert code == 2
    assert "predict runs in one process" in err


# Drawing


def detection(*boxes: tuple[int, int, int, int], size: int = 500) -> dict[str, Tensor]:
    masks = torch.zeros(len(boxes), size, size, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = True
    return {"boxes": torch.tensor(boxes, dtype=torch.float32), "masks": masks}


def test_colours_are_where_things_are_and_nowhere_else() -> None:
    image = torch.full((3, 500, 500), 100, dtype=torch.uint8)
    canvas = draw_detections(
        image, labels=["cat 0.90", "dog 0.80"], **detection((50, 100, 250, 300), (300, 320, 480, 480))
    )
    assert canvas.shape == image.shape
    for (y, x), colour in (((250, 150), COLOURS[0]), ((450, 450), COLOURS[1])):
        blended = torch.tensor(colour) * 0.45 + 100 * 0.55
        torch.testing.assert_close(canvas[:, y, x].float(), blended, atol=1.5, rtol=0)
    assert (canvas[:, :90, :] == 100).all()
    assert (canvas[:, 310:, :290] == 100).all()
    assert (image == 100).all()


def test_the_surest_is_on_top_of_others() -> None:
    image = torch.zeros(3, 500, 500, dtype=torch.uint8)
    found = detection((50, 100, 250, 300), (50, 100, 250, 300))
    canvas = draw_detections(image, labels=["cat 0.90", "dog 0.80"], **found)
    assert torch.equal(canvas[:, 300, 100], torch.tensor(COLOURS[0], dtype=torch.uint8)), "its frame"


def test_boxes_without_masks() -> None:
    image = torch.full((3, 600, 500), 7, dtype=torch.uint8)
    canvas = draw_detections(image, torch.tensor([[10.0, 60.0, 400.0, 500.0]]), ["face 0.99"])
    assert (canvas[:, 300, 200] == 7).all()
    assert (canvas[:, 300, 10] == torch.tensor(COLOURS[0])).all()


def test_long_images_are_not_enlarged_without_end() -> None:
    image = torch.zeros(3, 40, 1500, dtype=torch.uint8)
    masks = torch.ones(1, 40, 1500, dtype=torch.bool)
    boxes = torch.tensor([[0.0, 0.0, 1500.0, 40.0]])
    assert draw_detections(image, boxes, ["bar 0.9"], masks).shape == (3, 43, 1600)
