"""Networks for others: the files that are saved and uploaded, the model card, and the way back."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run as polynl_command
from PIL import Image
from rich.console import Console

import polynl
from polynl.errors import SettingsError
from polynl.models.about import about_file
from polynl.train.loop import train
from polynl.train.recipe_file import load_recipe

hub = pytest.importorskip("huggingface_hub", reason="needs the extra 'hub'")
TINY = Path(__file__).parents[1] / "train" / "tiny.yaml"
FILES = ["README.md", "config.json", "model.safetensors"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["classes", "instances", "faces"])
def test_a_saved_network_loads_as_it_was(
    kind: str, runs: dict[str, Path], photo: Path, tmp_path: Path
) -> None:
    run = polynl.load_run(runs[kind])
    assert run.save_pretrained(tmp_path / "shared") == tmp_path / "shared"
    assert names(tmp_path / "shared") == FILES
    again = polynl.from_pretrained(tmp_path / "shared")
    assert again.labels == run.labels
    for name, value in run.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    if kind == "classes":
        assert again.predict(photo) == run.predict(photo)
    else:
        assert torch.equal(again.predict(photo, threshold=0).scores, run.predict(photo, threshold=0).scores)


def test_the_weights_carry_their_scores(classifier: Path, tmp_path: Path) -> None:
    polynl.load_run(classifier).save_pretrained(tmp_path)
    about = about_file(tmp_path / "model.safetensors")
    (row,) = json.loads((classifier / "metrics.json").read_text())
    assert about.scores == {"top1": row["top1"]}
    assert about.epoch == 1
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["labels"] == {str(number): name for number, name in about.labels.items()}
    assert config["recipe"] == about.recipe
    assert config["library_name"] == "polynl"


@pytest.mark.parametrize(
    ("kind", "task"),
    [("classes", "image-classification"), ("instances", "image-segmentation"), ("faces", "object-detection")],
)
def test_the_hub_reads_the_card(kind: str, task: str, runs: dict[str, Path], tmp_path: Path) -> None:
    run = polynl.load_run(runs[kind])
    run.save_pretrained(tmp_path / "shared", name="me/mine", license="cc-by-4.0")
    card = hub.ModelCard.load(tmp_path / "shared" / "README.md")
    assert card.data.library_name == "polynl"
    assert (card.data.pipeline_tag, card.data.license) == (task, "cc-by-4.0")
    assert card.data.model_name == "me/mine"
    assert {result.metric_type for result in card.data.eval_results} == set(run.about.scores)
    assert 'polynl.from_pretrained("me/mine")' in card.text
    for name in run.labels.values():
        assert name in card.text
    count = {"classes": "6 classes", "instances": r"\d categories", "faces": "1 category"}[kind]
    assert re.search(rf"It has {count}: ", card.text)


def test_the_code_in_a_card_runs(
    classifier: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polynl.load_run(classifier).save_pretrained(tmp_path / "shared")
    monkeypatch.chdir(tmp_path)
    Image.open(photo).save("photo.jpg")
    (code,) = (tmp_path / "shared" / "README.md").read_text().split("```python\n")[1:]
    found: dict[str, Any] = {}
    exec(code.partition("```")[0], found)
    assert found["output"].shape == (1, 6)


def test_a_card_has_the_interval_of_the_last_epoch(classifier: Path, tmp_path: Path) -> None:
    """The run's only epoch is both its best and its last."""
    polynl.load_run(classifier).save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    (row,) = json.loads((classifier / "metrics.json").read_text())
    assert "| score | epoch 1, 95 % interval |" in text
    assert f"| top1 (Top-1) | {row['top1']:.1f} (" in text
    assert "On its 11 images of " in text


def test_the_best_epoch_does_not_get_the_interval_of_the_last(classifier: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(classifier, run)
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("epochs: 1\n", "epochs: 9\n"))
    polynl.load_run(run).save_pretrained(tmp_path / "shared")
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "| score | epoch 1 | last, 95 % interval |" in card


def test_a_card_without_scores_and_licence_says_so(classifier: Path, tmp_path: Path) -> None:
    polynl.load_run(
        _plain(classifier, tmp_path), recipe=str(TINY), overrides=["--epochs", "3"]
    ).save_pretrained(tmp_path / "shared")
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "No scores are known" in card
    assert "The licence was not stated" in card
    assert "model-index" not in card
    assert hub.ModelCard(card).data.license is None


def _plain(classifier: Path, folder: Path) -> Path:
    """The weights as another program would save them."""
    model = polynl.load_run(classifier).model
    torch.save(model.state_dict(), folder / "w.pth")
    return folder / "w.pth"


def test_nothing_that_is_shared_tells_of_this_machine(classifier: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for colour in ("red", "blue"):
            folder = tmp_path / "private" / "cats" / split / colour
            folder.mkdir(parents=True)
            Image.new("RGB", (16, 16), colour).save(folder / "1.png")
    keys = ["--epochs", "1", "--batch", "2", "--data.size", "16", "--data.resize", "16"]
    keys += ["--data.source", "image_folder", "--data.root", str(tmp_path / "private" / "cats")]
    keys += ["--model.weights", str(shutil.copy(classifier / "best.safetensors", tmp_path / "private"))]
    train(load_recipe(TINY, keys), tmp_path / "run", Console(quiet=True))
    polynl.load_run(tmp_path / "run").save_pretrained(tmp_path / "shared")
    for name in FILES:
        assert b"private" not in (tmp_path / "shared" / name).read_bytes(), name
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "- data: cats (`image_folder`)" in card
    assert "- started from: best.safetensors" in card


def test_a_run_is_not_overwritten(classifier: Path, tmp_path: Path) -> None:
    run = polynl.load_run(classifier)
    before = names(classifier)
    with pytest.raises(ValueError, match="is the folder that this was loaded from"):
        run.save_pretrained(classifier)
    assert names(classifier) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        run.save_pretrained(tmp_path / "file")


class FakeApi:
    """In place of HfApi: keeps what would be uploaded."""

    calls: list[tuple[str, dict[str, Any]]]
    files: dict[str, bytes]

    def __init__(self, **options: Any) -> None:
        type(self).calls = [("api", options)]

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.calls.append(("create", {"repo_id": repo_id, **options}))
        return hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("branch", {"repo_id": repo_id, **options}))

    def upload_folder(self, *, folder_path: Path, **options: Any) -> None:
        self.calls.append(("upload", options))
        type(self).files = {path.name: path.read_bytes() for path in folder_path.iterdir()}


def test_the_files_that_are_uploaded(
    classifier: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polynl.sharing.hub.HfApi", FakeApi)
    run = polynl.load_run(classifier)
    url = run.push_to_hub("me/mine", license="mit", private=True, token="t", revision="v1")
    assert url == "https://huggingface.co/me/mine"
    assert dict(FakeApi.calls) == {
        "api": {"token": "t", "library_name": "polynl"},
        "create": {"repo_id": "me/mine", "private": True, "exist_ok": True},
        "branch": {"repo_id": "me/mine", "branch": "v1", "exist_ok": True},
        "upload": {
            "repo_id": "me/mine",
            "revision": "v1",
            "commit_message": "Upload a network of polynl",
        },
    }
    assert sorted(FakeApi.files) == FILES
    assert b'polynl.from_pretrained("me/mine")' in FakeApi.files["README.md"]
    for name, content in FakeApi.files.items():
        (tmp_path / name).write_bytes(content)
    assert polynl.from_pretrained(tmp_path).predict(photo) == run.predict(photo)


def test_arguments_are_those_of_the_real_hub() -> None:
    for name, given in (
        ("create_repo", {"repo_id": "a/b", "private": None, "exist_ok": True}),
        ("create_branch", {"repo_id": "a/b", "branch": "v1", "exist_ok": True}),
        ("upload_folder", {"repo_id": "a/b", "folder_path": ".", "revision": None, "commit_message": ""}),
    ):
        inspect.signature(getattr(hub.HfApi, name)).bind(None, **given)


def test_a_network_in_the_cache_of_the_hub(classifier: Path, photo: Path, tmp_path: Path) -> None:
    """As the real package finds it without a network: a snapshot of links to blobs."""
    commit = "0" * 40
    repository = tmp_path / "models--me--mine"
    polynl.load_run(classifier).save_pretrained(repository / "blobs")
    (repository / "snapshots" / commit).mkdir(parents=True)
    for name in FILES:
        (repository / "snapshots" / commit / name).symlink_to(repository / "blobs" / name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    run = polynl.from_pretrained("me/mine", cache_dir=tmp_path, local_files_only=True)
    assert run.predict(photo) == polynl.load_run(classifier).predict(photo)


def test_what_the_hub_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"me/mine cannot be downloaded from the Hub: .*\.$") as caught:
        polynl.from_pretrained("me/mine", cache_dir=tmp_path, local_files_only=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(SettingsError, match="there is no such folder, and a name on the Hub has the form"):
        polynl.from_pretrained("no/such/folder")


def test_an_upload_that_is_refused(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeApi):
        def create_repo(self, repo_id: str, **options: Any) -> Any:
            raise ConnectionError("no network.\nmore")

    monkeypatch.setattr("polynl.sharing.hub.HfApi", Refusing)
    with pytest.raises(SettingsError, match=r"^me/mine cannot be uploaded to the Hub: no network\.$"):
        polynl.load_run(classifier).push_to_hub("me/mine")


def test_without_the_package_it_says_what_to_install(
    classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = polynl.load_run(classifier)
    monkeypatch.setattr("polynl.extras.extras", lambda: {"huggingface_hub": "hub"})
    monkeypatch.delitem(sys.modules, "polynl.sharing.hub", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for needs_it in (polynl.from_pretrained, run.push_to_hub):
        with pytest.raises(ModuleNotFoundError, match=r'huggingface_hub.*pip install "polynl\[hub\]"'):
            needs_it("me/mine")


def test_the_command_saves_and_uploads(
    classifier: Path,
    photo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polynl.sharing.hub.HfApi", FakeApi)
    out = tmp_path / "shared"
    words = ["share", classifier, "--out", out, "--push", "me/mine", "--private", "--license", "mit"]
    code, shown, err = polynl_command(capsys, *words)
    assert (code, err) == (0, "")
    assert shown.splitlines() == [
        f'Load it with polynl.from_pretrained("{out}").',
        "Uploaded to https://huggingface.co/me/mine.",
    ]
    assert dict(FakeApi.calls)["create"]["private"] is True
    assert b"license: mit" in FakeApi.files["README.md"]
    assert polynl.from_pretrained(out).predict(photo) == polynl.load_run(classifier).predict(photo)


@pytest.mark.parametrize("kind", ["classes", "instances"])
@pytest.mark.parametrize("given", ["", "model.safetensors"])
def test_a_shared_network_is_scored_as_its_run(
    given: str, kind: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    polynl.load_run(runs[kind]).save_pretrained(tmp_path / "shared")
    expected = polynl_command(capsys, "evaluate", runs[kind])
    assert expected[0] == 0
    assert polynl_command(capsys, "evaluate", tmp_path / "shared" / given) == expected


def test_keys_of_a_shared_network_can_be_overridden(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    polynl.load_run(classifier).save_pretrained(tmp_path / "shared")
    code, _, err = polynl_command(capsys, "evaluate", tmp_path / "shared", "--data.val-images", "0")
    assert code == 2
    assert "data.val_images" in err


def test_a_shared_network_is_compared_with_a_run(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    polynl.load_run(classifier).save_pretrained(tmp_path / "shared")
    code, shown, err = polynl_command(capsys, "compare", tmp_path / "shared", classifier)
    assert (code, err) == (0, "")
    assert "No difference: Top-1 is the same, whichever images are drawn." in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "specify where to: --out DIR, or --push USER/NAME for the Hub."),
        (["--out", "shared", "--private"], "--private needs --push."),
        (["--out", "RUN"], "is the folder that this was loaded from; choose another."),
    ],
)
def test_the_command_refuses(
    words: list[str],
    said: str,
    classifier: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(classifier) if word == "RUN" else word for word in words]
    code, _, err = polynl_command(capsys, "share", classifier, *given)
    assert code == 2
    assert said in err
    assert names(tmp_path) == []
