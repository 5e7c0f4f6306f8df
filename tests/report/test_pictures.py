"""What the networks of a study look at, of real runs, and what is said where there is nothing to look at."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from finished_runs import row, trained, written
from PIL import Image
from test_report_images import pixels

from polynl.explain import feature_norms
from polynl.explain.networks import network_from_checkpoint
from polynl.report.images import SMALL
from polynl.report.load import load_runs
from polynl.report.pictures import LARGE_IMAGES, Pictures, explain_image, study_pictures
from polynl.results.formats import number
from polynl.train.recipe_file import load_recipe, to_yaml


def made(*folders: Path) -> Pictures:
    (study,) = load_runs(folders).studies
    return study_pictures(study)


@pytest.fixture(scope="module")
def classified(reproduction: Path) -> Pictures:
    return made(reproduction)


def test_grad_cam_has_a_column_for_each_network(classified: Pictures) -> None:
    grid = classified.grad_cam
    assert grid is not None
    assert not classified.missing
    assert list(grid.headings) == ["image", "no block", "Non-local", "TESA", "Poly-NL"]
    assert len(grid.rows) == 5
    assert all(len(line) == 5 for line in grid.rows)
    assert len({picture.uri for line in grid.rows for picture in line}) == 25, "all are different pictures"


def test_below_a_picture_is_what_the_network_says(classified: Pictures, reproduction: Path) -> None:
    """Compared with the network itself, on the same scenes."""
    subject = network_from_checkpoint(reproduction / "poly_nl-seed0" / "best.safetensors")
    scenes = load_recipe(reproduction / "poly_nl-seed0" / "recipe.yaml").build_task().val_set()
    assert classified.grad_cam is not None
    marks = set()
    for line, place in zip(classified.grad_cam.rows, (0, 2, 5, 8, 10), strict=True):
        image, label = scenes[place]
        sure = subject.model(subject.inputs(image))[0].softmax(0)
        best = int(sure.argmax())
        marks.add(mark := "✓" if best == label else "✗")
        assert line[0].caption == subject.labels[label]
        assert line[4].caption == f"{mark} {subject.labels[best]}, {100 * sure[best]:.0f}%"
        assert (
            line[4].alt
            == f"Grad-CAM of Poly-NL on an image of {subject.labels[label]}: {line[4].caption[2:]}"
        )
    assert marks == {"✓", "✗"}, "the test saw only one kind"


def test_norms_are_of_every_block_poly_nl_first(classified: Pictures) -> None:
    assert [grid.title for grid in classified.norms] == ["Poly-NL", "Non-local", "TESA"]
    for grid in classified.norms:
        assert [len(line) for line in grid.rows] == [4] * 5
    assert (
        classified.norms[0].rows[0][1].alt.startswith("norm of X in Poly-NL at every position of an image of")
    )


def test_below_a_norm_are_its_lowest_and_highest_value(classified: Pictures, reproduction: Path) -> None:
    subject = network_from_checkpoint(reproduction / "poly_nl-seed0" / "best.safetensors")
    scene, _ = load_recipe(reproduction / "poly_nl-seed0" / "recipe.yaml").build_task().val_set()[0]
    norms = feature_norms(subject.model, subject.inputs(scene))
    captions = [picture.caption for picture in classified.norms[0].rows[0][1:]]
    assert captions == [f"{number(float(v.min()))} to {number(float(v.max()))}" for v in norms]
    assert len(set(captions)) == 3


def test_influence_is_of_the_blocks_that_have_it(classified: Pictures) -> None:
    assert classified.influence is not None
    assert [block["label"] for block in classified.influence["blocks"]] == ["Poly-NL", "Non-local"]
    assert [len(block["maps"]) for block in classified.influence["blocks"]] == [5, 5]
    assert classified.influence["blocks"][0]["maps"][0]["grid"] == (4, 4)
    assert [image["size"] for image in classified.influence["images"]] == [(16, 16)] * 5
    assert "box" not in classified.influence["blocks"][0]["maps"][0]
    starts = {shown["start"] for block in classified.influence["blocks"] for shown in block["maps"]}
    assert len(starts) > 1, "every map begins at a place of its own"
    assert classified.without_influence == [
        "TESA has no influence maps: its output is not a sum over positions."
    ]


def test_a_detector_is_about_what_it_is_surest_of(detector: Path) -> None:
    pictures = made(detector)
    assert pictures.detects
    subject = network_from_checkpoint(detector / "best.safetensors")
    scenes = load_recipe(detector / "recipe.yaml").build_task().val_set()
    assert pictures.grad_cam is not None
    assert pictures.influence is not None
    (block,) = pictures.influence["blocks"]
    assert [line[0].caption for line in pictures.grad_cam.rows] == ["image 1", "image 2", "image 3"]
    for place, line in enumerate(pictures.grad_cam.rows):
        with torch.no_grad():
            (found,) = subject.model(subject.inputs(scenes[place][0]))
        label, score = int(found["labels"][0]), float(found["scores"][0])
        assert score == float(found["scores"].max())
        said = f"{subject.labels[label]}, {100 * score:.0f}%"
        assert line[1].caption == said
        shown = block["maps"][place]
        assert shown["found"] == said
        assert shown["box"] == pytest.approx(found["boxes"][0].tolist(), abs=1e-3)
        assert shown["grid"] == (10, 10), "without the padding"
        # The picture is three times as large as the image; its box has a white lower edge.
        left, _, right, bottom = (min(round(3 * edge), 191) for edge in found["boxes"][0].tolist())
        for picture in (line[1], *pictures.norms[0].rows[place][1:]):
            assert pixels(picture.uri)[bottom - 1, left + 2 : right - 2].min() > 170
    assert [len(line) for line in pictures.norms[0].rows] == [4] * 3


def test_a_detector_that_finds_nothing_says_so(blind: Path) -> None:
    pictures = made(blind)
    assert pictures.grad_cam is not None
    for line in pictures.grad_cam.rows:
        assert line[1].caption == "nothing found"
        assert line[1].uri == line[0].uri, "there is nothing to lay over it"
    assert pictures.influence is not None
    assert all("box" not in shown for shown in pictures.influence["blocks"][0]["maps"])
    assert not pictures.missing


def test_a_block_without_norms_has_no_empty_grid(reproduction: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "polynl.report.pictures.explain_image", lambda *args: replace(explain_image(*args), norms=None)
    )
    pictures = made(reproduction)
    assert pictures.grad_cam is not None
    assert pictures.norms == []


def test_of_large_images_only_some_have_influence_maps(tmp_path: Path) -> None:
    """They take long, and the rest does not."""
    sizes = ("--data.size", f"{SMALL + 1}", "--data.images", "8", "--data.val-images", "5", "--epochs", "1")
    pictures = made(trained(tmp_path / "large", *sizes))
    assert pictures.influence is not None
    assert LARGE_IMAGES == len(pictures.influence["images"]) == 2
    assert [len(block["maps"]) for block in pictures.influence["blocks"]] == [2]
    assert pictures.grad_cam is not None
    assert len(pictures.grad_cam.rows) == len(pictures.norms[0].rows) == 5


def test_a_network_without_a_block_has_grad_cam_only(reproduction: Path) -> None:
    pictures = made(reproduction / "none-seed0")
    assert pictures.grad_cam is not None
    assert (pictures.norms, pictures.influence, pictures.without_influence, pictures.missing) == (
        [],
        None,
        [],
        [],
    )


def test_weights_that_are_gone_or_damaged(reproduction: Path, tmp_path: Path) -> None:
    """The other networks are looked into all the same."""
    gone = written(tmp_path / "gone", [row(1, top1=1.0)], "--model.block", "tesa")
    damaged = tmp_path / "damaged"
    shutil.copytree(reproduction / "non_local-seed0", damaged)
    (damaged / "best.safetensors").write_bytes(b"none")
    pictures = made(reproduction / "poly_nl-seed0", gone, damaged)
    assert pictures.grad_cam is not None
    assert list(pictures.grad_cam.headings) == ["image", "Poly-NL"]
    first, second = pictures.missing
    assert first.startswith("Non-local: --checkpoint: ")
    assert str(damaged / "best.safetensors") in first
    assert second == f"TESA: there are no weights in {gone}."


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Images with a blue stripe at the left, wider than high, and a network trained on them."""
    root = tmp_path_factory.mktemp("photos")
    for split in ("train", "val"):
        for red, name in enumerate(("<b>ant", "bee")):
            folder = root / "data" / split / name
            folder.mkdir(parents=True)
            for shade in range(4):
                picture = Image.new("RGB", (40, 24), (255 * red, 20 * shade, 0))
                picture.paste((0, 0, 255), (0, 0, 15, 24))
                picture.save(folder / f"{shade}.png")
    data = f"{{source: image_folder, root: {root / 'data'}, size: 16, resize: 24}}"
    return root / "data", trained(root / "run", "--data", data)


def test_images_are_shown_as_the_network_sees_them(photos: tuple[Path, Path]) -> None:
    """The middle of 16 × 16 pixels of 24 × 40 has 3 of the stripe; of them the networks say what they say."""
    pictures = made(photos[1])
    assert pictures.grad_cam is not None
    captions = [line[0].caption for line in pictures.grad_cam.rows]
    assert captions == ["<b>ant", "<b>ant", "bee", "bee", "bee"]
    shown = pixels(pictures.grad_cam.rows[-1][0].uri)
    assert shown.shape == (16, 16, 3)
    assert shown[0].tolist() == [[0, 0, 255]] * 3 + [[255, 60, 0]] * 13
    subject = network_from_checkpoint(photos[1] / "best.safetensors")
    for line in pictures.grad_cam.rows:
        image = torch.from_numpy(pixels(line[0].uri)).to(torch.uint8).permute(2, 0, 1)
        sure = subject.model(subject.inputs(image))[0].softmax(0).max()
        assert line[1].caption.endswith(f", {100 * sure:.0f}%")


def test_images_that_are_gone_or_unreadable(photos: tuple[Path, Path], tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos[0], data)
    shutil.copytree(photos[1], run)
    text = (run / "recipe.yaml").read_text().replace(str(photos[0]), str(data))
    (run / "recipe.yaml").write_text(text)
    for file in data.rglob("val/*/*.png"):
        file.write_bytes(b"no image")
    stopped = made(run)
    assert stopped.grad_cam is None
    assert "Poly-NL: " in stopped.missing[0]
    assert "0.png" in stopped.missing[0]
    (run / "recipe.yaml").write_text(text.replace("on_bad_image: stop", "on_bad_image: skip"))
    assert made(run).missing == ["Poly-NL: none of the images can be read."]
    for file in data.rglob("val/*/*.png"):
        file.unlink()
    (none,) = made(run).missing
    assert none.startswith(f"Poly-NL: data.root: {data / 'val'} has no images in ")
    shutil.rmtree(data / "val")
    assert made(run).missing == [f"Poly-NL: data.root: {data} has no folder 'val'."]
    shutil.rmtree(data)
    assert made(run).missing == [f"Poly-NL: data.root: no such folder: {data}."]


@pytest.mark.parametrize("task", ["classification", "face_detection"])
def test_a_folder_named_from_where_it_was_trained(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be done about it is not what `polynl train` would say: a report takes no keys."""
    source = {"classification": "image_folder", "face_detection": "wider_face"}[task]
    run = trained(tmp_path / "run", "--epochs", "1", task=task)
    recipe = load_recipe(run / "recipe.yaml", ("--data", f"{{source: {source}, root: below}}"))
    (run / "recipe.yaml").write_text(to_yaml(recipe))
    monkeypatch.chdir(tmp_path)
    assert made(run).missing == [
        "Poly-NL: data.root: no such folder: below: run polynl report in the folder where it was trained."
    ]
    (tmp_path / "below").mkdir()
    (missing,) = made(run).missing
    assert "no such folder: below/WIDER_val/images." in missing or "has no folder 'val'." in missing
    assert "--" not in missing
    assert "run polynl report" not in missing
