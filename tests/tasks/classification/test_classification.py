"""Classification: loss and normalisation by hand, and what the options of a recipe do to training."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d
from torchvision.transforms import v2

from polynl import inserted
from polynl.data.images import Unreadable, UnreadableImageError
from polynl.data.scenes import Scenes
from polynl.errors import SettingsError
from polynl.models.resnet import resnet
from polynl.models.weights import load_weights
from polynl.tasks.base import Batch
from polynl.tasks.classification.config import ClassificationConfig
from polynl.tasks.classification.task import Classification
from polynl.train.loading import hash_seed
from polynl.train.loop import train
from polynl.train.processes import Processes
from polynl.train.recipe_file import load_recipe

TINY = Path(__file__).parents[2] / "train" / "tiny.yaml"
BLOCK = "layer3.0.polynl_before."


def tiny(*overrides: str) -> ClassificationConfig:
    recipe = load_recipe(TINY, overrides)
    assert isinstance(recipe, ClassificationConfig)
    return recipe


def trained(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The rows and the last weights of a run."""
    rows = train(tiny(*overrides), folder, Console(quiet=True))
    assert all(math.isfinite(row["loss"]) for row in rows)
    return rows, load_file(folder / "last.safetensors")


def first_weights(*overrides: str) -> dict[str, Tensor]:
    recipe = tiny(*overrides)
    torch.manual_seed(hash_seed(recipe.seed))
    return recipe.build_task().model().state_dict()


def some_batch(task: Classification, count: int = 6) -> Batch:
    data = task.train_set()
    return task.collate([data[index] for index in range(count)], training=True)


# Loss, normalisation, batches


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_cross_entropy_by_hand(smoothing: float) -> None:
    task = tiny("--loss.label-smoothing", str(smoothing)).build_task()
    torch.manual_seed(0)
    model = task.model().eval()
    batch = some_batch(task)
    (loss,) = task.losses(model, batch).values()
    logits = task.logits(model, batch.images).detach().double()
    expected = 0.0
    for row, label in zip(logits, batch.targets.tolist(), strict=True):
        logs = [float(value) - math.log(sum(math.exp(v) for v in row.tolist())) for value in row]
        expected -= (1 - smoothing) * logs[label] + smoothing * sum(logs) / len(logs)
    assert loss.item() == pytest.approx(expected / len(batch), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "mean", "std"),
    [
        ((), (0.3, 0.3, 0.3), (0.25, 0.25, 0.25)),
        (("--data.mean", "[0.1,0.2,0.9]", "--data.std", "[1,2,0.5]"), (0.1, 0.2, 0.9), (1, 2, 0.5)),
    ],
)
def test_the_network_sees_normalised_images(words: tuple[str, ...], mean: Any, std: Any) -> None:
    task = tiny(*words).build_task()
    images = some_batch(task).images
    assert images.dtype == torch.uint8
    expected = v2.Normalize(mean, std)(images.float() / 255)
    torch.testing.assert_close(task.logits(nn.Identity(), images), expected, rtol=1e-5, atol=1e-5)


def test_a_folder_of_images_is_normalised_as_imagenet_is(tmp_path: Path) -> None:
    recipe = tiny("--data.source", "image_folder", "--data.root", str(tmp_path))
    grey = torch.full((1, 3, 2, 2), 128, dtype=torch.uint8)
    seen = Classification(recipe).logits(nn.Identity(), grey)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(seen[0, :, 0, 0], (128 / 255 - mean) / std)


def samples(*kinds: str) -> list[Any]:
    """Images that are all of their number, and what stands in for the others."""
    return [
        (torch.full((3, 2, 2), number, dtype=torch.uint8), number)
        if kind == "good"
        else Unreadable(f"{number}.jpg", f"{number}.jpg is not a readable image")
        for number, kind in enumerate(kinds)
    ]


def test_readable_images_fill_the_places_of_others_in_training() -> None:
    batch = tiny().build_task().collate(samples("bad", "good", "bad", "good", "bad"), training=True)
    assert len(batch) == 5, "every process takes as many images as the others"
    assert batch.targets.tolist() == [1, 3, 1, 3, 1]
    assert batch.images[:, 0, 0, 0].tolist() == [1, 3, 1, 3, 1]
    assert batch.bad == tuple(f"{number}.jpg is not a readable image" for number in (0, 2, 4))


def test_scoring_counts_no_image_twice() -> None:
    batch = tiny().build_task().collate(samples("bad", "good", "good"), training=False)
    assert (batch.targets.tolist(), len(batch.bad)) == ([1, 2], 1)
    assert batch.images.shape == (2, 3, 2, 2)


def test_a_batch_without_a_readable_image() -> None:
    task = tiny().build_task()
    empty = task.collate(samples("bad", "bad"), training=False)
    assert (len(empty), len(empty.bad)) == (0, 2)
    with pytest.raises(UnreadableImageError, match=r"no image of a batch of 2 can be read; 0\.jpg is no"):
        task.collate(samples("bad", "bad"), training=True)


def test_batches_move_with_what_is_in_them() -> None:
    images = torch.zeros(2, 3, 4, 4)
    batch = Batch(images, {"boxes": [torch.ones(1), "name"]}, ("bad",))
    moved = batch.to(torch.device("meta"), channels_last=True)
    assert moved.images.device.type == moved.targets["boxes"][0].device.type == "meta"
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert moved.targets["boxes"][1] == "name"
    assert moved.bad == ("bad",)
    assert batch.to(torch.device("cpu"), channels_last=False).images.is_contiguous()


# Training, against a loop by hand


def by_hand(recipe: ClassificationConfig, optimizer_of: Any, clip: float | None = None) -> dict[str, Tensor]:
    """The weights after the run, from torch's own parts."""
    data = Scenes(20, size=16, difficulty="easy", split="train", seed=0)
    torch.manual_seed(hash_seed(recipe.seed))
    model = resnet("small_resnet", block="poly_nl", arch_options={"depth": 1, "width": 4}, num_classes=6)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    free = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": free, "weight_decay": 0.0}]
    optimizer = optimizer_of(groups)
    for epoch in range(recipe.epochs):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(hash_seed(recipe.seed, epoch)))
        for indices in order[:16].reshape(2, 8).tolist():
            images = torch.stack([data[index][0] for index in indices]) / 255
            labels = torch.tensor([data[index][1] for index in indices])
            loss = nn.functional.cross_entropy(model((images - 0.3) / 0.25), labels)
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                total = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
                for p in model.parameters():
                    p.grad *= min(1.0, clip / total.item())
            optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("words", "optimizer_of", "clip"),
    [
        ("--optimizer.lr 0.02", lambda g: torch.optim.SGD(g, lr=0.02, momentum=0.9), None),
        (
            "--optimizer.lr 0.02 --optimizer.nesterov true --optimizer.momentum 0.7",
            lambda g: torch.optim.SGD(g, lr=0.02, momentum=0.7, nesterov=True),
            None,
        ),
        (
            "--optimizer.name adamw --optimizer.lr 1e-3 --optimizer.betas [0.8,0.95]",
            lambda g: torch.optim.AdamW(g, lr=1e-3, betas=(0.8, 0.95)),
            None,
        ),
        (
            "--optimizer.lr 0.02 --optimizer.clip-norm 0.1",
            lambda g: torch.optim.SGD(g, lr=0.02, momentum=0.9),
            0.1,
        ),
        (
            "--optimizer.lr 0.01 --optimizer.lr-batch 4",
            lambda g: torch.optim.SGD(g, lr=0.02, momentum=0.9),
            None,
        ),
    ],
    ids=["sgd", "nesterov", "adamw", "clipped", "scaled rate"],
)
def test_training_is_what_a_loop_by_hand_does(
    tmp_path: Path, words: str, optimizer_of: Any, clip: Any
) -> None:
    given = [*words.split(), "--optimizer.weight-decay", "0.01"]
    _, weights = trained(tmp_path, *given)
    expected = by_hand(tiny(*given), optimizer_of, clip)
    assert weights.keys() == expected.keys()
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=2e-5)
    before = first_weights(*given)
    moved = max((weights[key] - before[key]).abs().max().item() for key in ("conv1.weight", "fc.weight"))
    assert moved > 1e-3, "or the comparison would compare beginnings"


ONE_STEP = [
    "--epochs",
    "1",
    "--data.images",
    "8",
    "--optimizer.momentum",
    "0",
    "--optimizer.weight-decay",
    "0",
]


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_step_is_no_longer_than_the_clipped_gradient(tmp_path: Path, precision: str) -> None:
    words = [*ONE_STEP, "--precision", precision, "--optimizer.lr", "1", "--optimizer.clip-norm", "0.01"]
    _, weights = trained(tmp_path, *words)
    before, names = first_weights(*words), dict(tiny().build_task().model().named_parameters())
    length = math.sqrt(sum((weights[name] - before[name]).double().square().sum() for name in names))
    assert length == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("init", ["identity", "random"])
def test_gradients_reach_every_parameter_of_the_block(tmp_path: Path, init: str) -> None:
    words = ["--model.options.init", init, "--optimizer.weight-decay", "0"]
    before, (_, after) = first_weights(*words), trained(tmp_path, *words)
    parameters = [key for key in after if key.startswith(BLOCK)]
    assert len(parameters) == 5
    for key in parameters:
        assert not torch.equal(before[key], after[key]), key


def test_without_a_block_there_is_none(tmp_path: Path) -> None:
    _, weights = trained(tmp_path, "--model.block", "none", "--epochs", "1")
    assert not any("polynl" in key for key in weights)


# Options that are about how, seen from inside the network


@pytest.fixture
def seen(monkeypatch: Any) -> dict[str, set[Any]]:
    """What the first convolution and the classifier of every new model meet, in training and in scoring."""
    found: dict[str, set[Any]] = {}
    build = Classification.model

    def watched(self: Classification) -> nn.Module:
        model = build(self)

        def look(name: str) -> Any:
            def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
                dense = args[0].ndim == 4 and not args[0].is_contiguous()
                when = "training" if module.training else "scoring"
                found.setdefault(f"{name} {when}", set()).add((dense, output.dtype))

            return hook

        for name in ("conv1", "layer3", "fc"):
            model.get_submodule(name).register_forward_hook(look(name))
        return model

    monkeypatch.setattr(Classification, "model", watched)
    return found


@pytest.mark.parametrize("layout", [False, True])
def test_channels_last_reaches_the_network(tmp_path: Path, seen: dict[str, set[Any]], layout: bool) -> None:
    trained(tmp_path, "--channels-last", str(layout).lower())
    for name in ("conv1 training", "conv1 scoring", "layer3 training"):
        assert seen[name] == {(layout, torch.float32)}, name


def test_channels_last_computes_the_same(tmp_path: Path) -> None:
    rows = [trained(tmp_path / str(on), "--channels-last", str(on).lower())[0] for on in (False, True)]
    assert [row["loss"] for row in rows[0]] == pytest.approx([row["loss"] for row in rows[1]], rel=1e-3)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_narrow_precision_reaches_the_network(
    tmp_path: Path, seen: dict[str, set[Any]], precision: str
) -> None:
    # A block would be measured in float32 after every epoch.
    keys = ("--channels-last", "true", "--model.block", "none")
    rows, weights = trained(tmp_path, "--precision", precision, *keys)
    dtype = getattr(torch, precision)
    for name in ("conv1", "fc"):
        for when in ("training", "scoring"):
            assert {found for _, found in seen[f"{name} {when}"]} == {dtype}
    assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}
    exact = trained(tmp_path / "exact", *keys)[0]
    assert rows[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.02)
    assert rows[0]["loss"] != exact[0]["loss"]


@pytest.fixture
def _determinism_restored() -> Iterator[None]:
    benchmark, variable = torch.backends.cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    if variable is None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("_determinism_restored")
def test_deterministic_asks_torch_for_it(tmp_path: Path) -> None:
    _, plain = trained(tmp_path / "plain", "--epochs", "1")
    assert not torch.are_deterministic_algorithms_enabled()
    _, deterministic = trained(tmp_path / "deterministic", "--epochs", "1", "--deterministic", "true")
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"], "cuBLAS refuses without it"
    assert all(torch.equal(plain[key], deterministic[key]) for key in plain), "a CPU always is"


# Norms and weights


def test_frozen_norms_stay_and_the_rest_moves(tmp_path: Path) -> None:
    torch.manual_seed(3)
    source = resnet("small_resnet", arch_options={"width": 4}, num_classes=6)
    for norm in (module for module in source.modules() if isinstance(module, nn.BatchNorm2d)):
        for value in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            nn.init.uniform_(value, 0.5, 1.5)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    words = ["--model.norm", "frozen", "--model.weights", str(tmp_path / "weights.pth")]
    model = tiny(*words).build_task().model()
    kinds = {type(module) for name, module in model.named_modules() if "bn" in name}
    assert kinds == {FrozenBatchNorm2d}
    assert list(inserted(model)) == ["layer3.0.polynl_before"]
    _, weights = trained(tmp_path / "run", *words)
    before = source.state_dict()
    for key, value in weights.items():
        frozen = "bn" in key or "downsample.1" in key
        assert key.startswith(BLOCK) or torch.equal(value, before[key]) == frozen, key


def test_a_frozen_network_takes_weights_of_one_that_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = resnet("small_resnet", arch_options={"width": 4}, num_classes=6)
    source(torch.randn(4, 3, 16, 16))
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    model = tiny("--model.norm", "frozen").build_task().model()
    load_weights(model, tmp_path / "weights.pth")
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model.eval()(x), source.eval()(x))


def test_synchronised_norms_are_put_in() -> None:
    model = tiny("--model.norm", "sync").build_task().model()
    norms = [module for name, module in model.named_modules() if name.endswith(("bn1", "bn2", "bn3"))]
    assert {type(norm) for norm in norms} == {nn.SyncBatchNorm}
    assert list(inserted(model)) == ["layer3.0.polynl_before"]
    cpu = torch.device("cpu")
    Processes(0, 1, cpu).check_model(model)
    with pytest.raises(SettingsError, match=r"model\.norm: sync needs GPUs"):
        Processes(0, 2, cpu).check_model(model)


@pytest.mark.parametrize("with_block", [False, True])
def test_a_run_starts_from_the_weights_of_a_file(tmp_path: Path, with_block: bool) -> None:
    torch.manual_seed(5)
    block = "poly_nl" if with_block else None
    source = resnet("small_resnet", block=block, arch_options={"width": 4}, num_classes=6)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    words = ["--model.weights", str(tmp_path / "weights.pth")]
    recipe = tiny(*words)
    state = recipe.build_task().model().state_dict()
    assert all(torch.equal(state[key], value) for key, value in source.state_dict().items())
    assert len(state) == len(source.state_dict()) + (0 if with_block else 5)
    # So little is learned in these steps that the beginning can be seen in the end.
    _, weights = trained(tmp_path / "run", *words, "--optimizer.lr", "1e-6")
    torch.testing.assert_close(weights["conv1.weight"], source.conv1.weight.detach(), rtol=0, atol=1e-4)


def test_seeds_differ_from_the_first_weights_on() -> None:
    one, other = first_weights(), first_weights("--seed", "1")
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])
    assert torch.equal(one["conv1.weight"], first_weights()["conv1.weight"])


def test_checking_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    tiny().build_task().check()
    assert torch.equal(torch.rand(3), expected)
