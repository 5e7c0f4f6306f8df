"""`polynl bench nets`: every variant beside the plain network."""

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from polynl.bench.networks import NETWORKS, run_networks, selected_variants
from polynl.bench.settings import NetSettings
from polynl.errors import SettingsError
from polynl.models.resnet import PLACEMENTS
from polynl.results.benchmark import Point, Results

TINY = NetSettings(
    network="resnet18", blocks=("poly_nl", "tesa"), placements=("res4", "res345"), side=32, batch=2, runs=2
)


def test_variants_are_blocks_at_placements() -> None:
    assert list(selected_variants(TINY)) == [
        "plain",
        "poly_nl@res4",
        "tesa@res4",
        "poly_nl@res345",
        "tesa@res345",
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[NetSettings, Results, str]:
    """A run: its settings, its results and what it printed."""
    out, console = tmp_path_factory.mktemp("nets"), Console(file=StringIO(), width=160)
    settings = replace(TINY, out=out, blocks=("poly_nl",), placements=("res4",), training=True)
    results = run_networks(settings, console)
    return settings, results, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_counts_and_measures(finished: tuple[NetSettings, Results, str]) -> None:
    settings, results, text = finished
    assert Results.load(settings.out / "nets.json") == results
    plain, variant = results.methods["plain"], results.methods["poly_nl@res4"]
    # 256 channels before layer3.1; a map of 32 × 32 has 2 × 2 positions there.
    assert variant["parameters"] - plain["parameters"] == 3 * 256**2 + 2
    assert plain["parameters"] == sum(
        p.numel() for p in NETWORKS["resnet18"].build(None, "res4").parameters()
    )
    assert variant["multiply_adds"] > plain["multiply_adds"] > 0
    points = {m.point for m in results.measurements}
    assert points == {Point("forward", 1, 32), Point("forward", 2, 32), Point("training", 2, 32)}
    assert all(len(m.seconds) == 2 and m.peak_bytes for m in results.measurements)
    many = results.at("plain", Point("forward", 2, 32))
    assert many is not None
    assert many.median is not None
    assert f"{2 / many.median:.1f} (1.00)" in text
    assert "Poly-NL at res4" in text
    assert "Poly-NL at res4" in (settings.out / "nets.md").read_text()


def test_resuming_a_finished_run_changes_nothing(finished: tuple[NetSettings, Results, str]) -> None:
    settings, results, _ = finished
    assert run_networks(replace(settings, resume=True), Console(file=StringIO())) == results


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "resnet5"}, "no network is called 'resnet5'.*resnet50"),
        ({"placements": ("rs4",)}, "no placement is called 'rs4'.*res4"),
    ],
)
def test_unknown_names(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        run_networks(replace(TINY, **options), Console(file=StringIO()))  # type: ignore[arg-type]


def test_networks_run_with_each_placement() -> None:
    network = NETWORKS["resnet18"]
    for placement in PLACEMENTS:
        model = network.build(torch.nn.Identity, placement)
        assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 1000)


@pytest.mark.parametrize(
    ("network", "placement"), [("torchvision/resnet18", "res4"), ("timm/convnext_atto", "stages.2.blocks.1")]
)
def test_networks_of_libraries_by_their_names(network: str, placement: str, tmp_path: Path) -> None:
    if network.startswith("timm"):
        pytest.importorskip("timm", reason="needs the extra 'timm'")
    settings = replace(
        TINY, network=network, blocks=("poly_nl",), placements=(placement,), runs=1, out=tmp_path
    )
    results = run_networks(settings, Console(quiet=True))
    plain, variant = results.methods["plain"], results.methods[f"poly_nl@{placement}"]
    assert plain["label"] == network
    assert variant["parameters"] > plain["parameters"]
    assert all(m.seconds for m in results.measurements)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("torchvision/resnet181", "torchvision has no network 'resnet181'. Did you mean resnet18"),
        (
            "torchvision/mobilenet_v2",
            "needs a layer3, and MobileNetV2 has none; name a module to put the block before, such as "
            "features.17. Choose modules of the network",
        ),
        ("torchvision/ssdlite320_mobilenet_v3_large", "only classifiers can be measured"),
        ("keras/resnet18", "expected torchvision/NAME or timm/NAME"),
    ],
)
def test_networks_of_libraries_that_cannot_be_measured(network: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)) as caught:
        run_networks(replace(TINY, network=network, out=tmp_path), Console(quiet=True))
    assert "?." not in str(caught.value)
