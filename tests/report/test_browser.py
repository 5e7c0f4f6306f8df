"""The report in a real browser: it loads from disk, shows every section, and maps answer to the pointer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polynl.explain import feature_norms, influence_maps
from polynl.explain.networks import network_from_checkpoint
from polynl.report.page import SECTIONS
from polynl.train.recipe_file import load_recipe

DESKTOP, PHONE = (1280, 900), (390, 844)


class Shown:
    """The page as a reader has it before them."""

    def __init__(self, browser: Any, file: Path) -> None:
        self.browser, self._file = browser, file

    def open(self, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for log in ("browser", "performance"):
            self.browser.get_log(log)
        self.browser.get(self._file.as_uri())
        self.wait(lambda: all(self.drawn(place) for place in range(2)))

    def wait(self, condition: Callable[[], bool]) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, 20, poll_frequency=0.02).until(lambda _: condition())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def find(self, selector: str, place: int = 0) -> Any:
        return self.run("return document.querySelectorAll(arguments[0])[arguments[1]]", selector, place)

    def drawn(self, place: int = 0) -> str:
        """What a map tells; empty before it is drawn."""
        return self.find(".readout", place).text

    def pixels(self, place: int = 0) -> str:
        return self.run("return document.querySelectorAll('canvas')[arguments[0]].toDataURL()", place)

    def point(self, across: float, down: float, place: int = 0) -> None:
        """Move the pointer over a map, from its upper left corner 0, 0 to the lower right one 1, 1."""
        from selenium.webdriver import ActionChains

        canvas = self.find("canvas", place)
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
        x, y = (canvas.size[side] * (part - 0.5) for side, part in (("width", across), ("height", down)))
        ActionChains(self.browser, duration=0).move_to_element_with_offset(canvas, x, y).perform()

    def press(self, *keys: str, place: int = 0) -> None:
        for key in keys:
            self.find("canvas", place).send_keys(key)

    def click(self, selector: str, place: int) -> None:
        button = self.find(selector, place)
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
        button.click()

    def pressed(self, selector: str) -> list[bool]:
        script = "return [...document.querySelectorAll(arguments[0])].map((b) => b.ariaPressed === 'true')"
        return self.run(script, selector)


@pytest.fixture
def shown(browser: Any, report: Path) -> Shown:
    return Shown(browser, report)


def test_it_loads_without_an_error_and_without_the_network(shown: Shown) -> None:
    shown.open()
    assert [entry for entry in shown.browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    messages = [json.loads(entry["message"])["message"] for entry in shown.browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert any(url.startswith("file:") for url in sent), "the log has the page itself"
    assert [url for url in sent if not url.startswith(("file:", "data:", "chrome:"))] == []
    assert len([url for url in sent if url.startswith("file:")]) == 1


def test_a_script_error_would_be_seen(shown: Shown) -> None:
    """What the test above looks at has an error when there is one."""
    shown.open()
    shown.run("setTimeout(() => { throw new Error('on purpose') })")
    found: list[dict[str, str]] = []

    def seen() -> bool:
        found.extend(entry for entry in shown.browser.get_log("browser") if entry["level"] == "SEVERE")
        return bool(found)

    shown.wait(seen)
    assert "on purpose" in found[0]["message"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_section_is_seen(size: tuple[int, int], shown: Shown) -> None:
    shown.open(size)
    boxes = shown.run(
        "return [...document.querySelectorAll('section')].map((s) => [s.id, s.offsetWidth, s.offsetHeight,"
        " getComputedStyle(s).visibility, s.querySelector('h2').innerText])"
    )
    assert [(name, heading) for name, *_, heading in boxes] == list(SECTIONS.items())
    for name, width, height, visibility, _ in boxes:
        assert width > 0.85 * min(size[0], 1180), name
        assert height > 100, name
        assert visibility == "visible"
    images = shown.run("return [...document.images].map((i) => [i.complete, i.naturalWidth])")
    assert len(images) > 50
    assert all(complete and width > 0 for complete, width in images)
    charts = shown.run("return [...document.querySelectorAll('svg.chart')].map((c) => c.clientHeight)")
    assert len(charts) > 8
    assert min(charts) > 150


def test_nothing_sticks_out_on_a_phone(shown: Shown) -> None:
    shown.open(PHONE)
    shown.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert shown.run("return document.documentElement.scrollWidth") == PHONE[0]
    sticks_out = shown.run(
        "return [...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, pre, svg') &&"
        " e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert sticks_out == []
    captions = shown.run("return [...document.querySelectorAll('caption span')].map((c) => c.offsetWidth)")
    assert captions
    assert max(captions) < PHONE[0] - 32
    small = shown.run(
        "return [...document.querySelectorAll('button')].map((b) => Math.min(b.offsetWidth, b.offsetHeight))"
    )
    assert min(small) >= 44, "a finger needs that"


LABELS = """
const edges = (text) => {
  const box = text.getBoundingClientRect();
  return [text.textContent, box.left, box.top, box.right, box.bottom];
};
return [...document.querySelectorAll("svg.chart")].map((c) => [...c.querySelectorAll("text")].map(edges));
"""


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_labels_of_charts_do_not_overlap(size: tuple[int, int], shown: Shown) -> None:
    """As the browser's own font has them."""
    shown.open(size)
    for chart in shown.run(LABELS):
        for place, (text, left, top, right, bottom) in enumerate(chart):
            assert left >= 0
            assert right <= size[0]
            assert bottom - top > 9, "legible"
            for other, *edges in chart[place + 1 :]:
                apart = right <= edges[0] or edges[2] <= left or bottom <= edges[1] + 4 or edges[3] <= top + 4
                assert apart, (text, other)


CONTRASTS = r"""
const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
const light = (colour) => {
  const [r, g, b] = numbers(colour).slice(0, 3)
    .map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor, alpha = numbers(colour)[3];
    if (alpha === undefined || alpha === 1) return colour;
  }
  return "rgb(255, 255, 255)";
};
const found = {};
for (const e of document.querySelectorAll("body *")) {
  const words = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!words || !e.getClientRects().length) continue;
  const style = getComputedStyle(e), colour = e.closest("svg") ? style.fill : style.color;
  const [a, b] = [light(colour), light(ground(e))].sort((x, y) => y - x);
  found[`${colour} on ${ground(e)}, ${e.tagName}`] = (a + 0.05) / (b + 0.05);
}
return found;
"""


def test_light_and_dark_are_both_readable(shown: Shown) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        shown.open(scheme=scheme)
        grounds[scheme] = shown.run("return getComputedStyle(document.body).backgroundColor")
        contrasts = shown.run(CONTRASTS)
        assert len(contrasts) > 10
        assert {pair: value for pair, value in contrasts.items() if value < 4.5} == {}
    assert grounds["light"] == "rgb(255, 255, 255)"
    assert max(map(int, grounds["dark"][4:-1].split(","))) < 40


def test_the_map_follows_the_pointer(shown: Shown) -> None:
    """4 × 4 positions: the pointer is over the first, then over the last."""
    shown.open()
    shown.point(0.6, 0.6)
    middle = shown.pixels()
    assert shown.drawn().startswith("Row 3, column 3 of 4 × 4")
    shown.point(0.1, 0.1)
    first, told = shown.pixels(), shown.drawn()
    assert told.startswith("Row 1, column 1 of 4 × 4")
    shown.point(0.9, 0.6)
    assert shown.drawn().startswith("Row 3, column 4 of 4 × 4")
    assert len({middle, first, shown.pixels()}) == 3


def percent(text: str) -> float:
    """The first figure in a text."""
    number = text.partition(" %")[0].rpartition(" ")[2] if "%" in text else "0"
    return float(number.replace("−", "-"))


PIXEL = "return [...document.querySelector('canvas').getContext('2d').getImageData(...arguments, 1, 1).data]"


def test_the_map_tells_and_colours_the_shares_that_were_computed(shown: Shown, reproduction: Path) -> None:
    """Of the upper right position; the canvas has 160 pixels for each of 4 × 4."""
    run = reproduction / "poly_nl-seed0"
    subject = network_from_checkpoint(run / "best.safetensors")
    scene, _ = load_recipe(run / "recipe.yaml").build_task().val_set()[0]
    shares = 100 * influence_maps(subject.model, subject.inputs(scene)[0])[0, 3].detach()
    place = int(shares.abs().argmax())
    row, column = divmod(place, 4)
    shown.open()
    shown.point(0.9, 0.1)
    first = shown.find(".readout li").text
    assert first.startswith(f"row {row + 1}, column {column + 1}: ")
    # Whole percents are shown from ten on, and a share is one of 127 steps.
    step = float(shares.abs().max()) / 127
    assert percent(first) == pytest.approx(float(shares.flatten()[place]), abs=0.51)
    _, _, shares_of = shown.drawn().partition("Its own share is ")
    own, _, against = shares_of.partition("Negative shares: ")
    assert percent(own) == pytest.approx(float(shares[0, 3]), abs=0.51 + step)
    assert percent(against) == pytest.approx(float(shares.clamp(max=0).sum()), abs=0.51 + 16 * step)
    red, _, blue, _ = shown.run(PIXEL, 160 * column + 20, 160 * row + 20)
    assert (red > 150 and blue < 60) if shares.flatten()[place] > 0 else (blue > 120 and red < 60)
    weakest_row, weakest_column = divmod(int(shares.abs().argmin()), 4)
    *colour, _ = shown.run(PIXEL, 160 * weakest_column + 20, 160 * weakest_row + 20)
    # 40 pixels of the canvas show one of the image.
    original = scene[:, 4 * weakest_row, 4 * weakest_column].tolist()
    assert colour == pytest.approx(original, abs=20), "the image keeps its colours where the shares are small"


def test_arrow_keys_move_the_marked_position(shown: Shown) -> None:
    from selenium.webdriver.common.keys import Keys

    shown.open()
    shown.point(0.6, 0.6)
    before = shown.pixels()
    for key, place in (
        (Keys.ARROW_UP, "Row 2, column 3"),
        (Keys.ARROW_LEFT, "Row 2, column 2"),
        (Keys.ARROW_DOWN, "Row 3, column 2"),
        (Keys.ARROW_RIGHT, "Row 3, column 3"),
    ):
        shown.press(key)
        assert shown.drawn().startswith(place)
    assert shown.pixels() == before, "the same position looks the same"
    shown.press(*[Keys.ARROW_RIGHT] * 9)
    assert shown.drawn().startswith("Row 3, column 4"), "there is nothing beyond the edge"


def test_buttons_choose_the_block_and_the_image(shown: Shown) -> None:
    """The first map has two blocks and five images; the detector's comes after them."""
    shown.open()
    assert shown.pressed("button.block") == [True, False, True]
    first, other_map = shown.pixels(), shown.pixels(1)
    shown.click("button.block", 1)
    shown.wait(lambda: shown.pixels() != first)
    second = shown.pixels()
    assert shown.pressed("button.block") == [False, True, True]
    shown.click("button.image", 3)
    shown.wait(lambda: shown.pixels() not in (first, second))
    assert shown.pressed("button.image") == [False, False, False, True, False, True, False, False]
    assert shown.pressed("button.block") == [False, True, True]
    shown.click("button.image", 0)
    shown.click("button.block", 0)
    shown.wait(lambda: shown.pixels() == first)
    assert shown.pixels(1) == other_map, "the other map has not moved"


WHITE_ALONG_A_ROW = """
const [left, right, row] = arguments, canvas = document.querySelectorAll("canvas")[1];
const { data } = canvas.getContext("2d").getImageData(left, row, right - left, 1);
let white = 0;
for (let at = 0; at < data.length; at += 4) white += data[at] > 240 && data[at + 2] > 240;
return white / (right - left);
"""


def test_a_map_begins_where_the_block_adds_most(shown: Shown, reproduction: Path) -> None:
    run = reproduction / "poly_nl-seed0"
    subject = network_from_checkpoint(run / "best.safetensors")
    scene, _ = load_recipe(run / "recipe.yaml").build_task().val_set()[0]
    added = feature_norms(subject.model, subject.inputs(scene)).y[0]
    row, column = divmod(int(added.argmax()), 4)
    shown.open()
    assert shown.drawn().startswith(f"Row {row + 1}, column {column + 1} of 4 × 4")


def test_a_detectors_map_begins_in_its_box(shown: Shown) -> None:
    """Of an image of 64 pixels, which the canvas shows ten times as large, with 10 × 10 cells."""
    shown.open()
    content = json.loads(shown.run("return document.querySelectorAll('script[type]')[1].textContent"))
    (found, *_), *_ = (block["maps"] for block in content["blocks"])
    left, top, right, bottom = found["box"]
    row, column = int((top + bottom) / 2 / 6.4) + 1, int((left + right) / 2 / 6.4) + 1
    assert shown.drawn(1).startswith(f"Row {row}, column {column} of 10 × 10")
    assert f"Dashed box: {found['found']}." in shown.drawn(1)
    inside = [round(10 * x) for x in (left, right)]
    assert shown.run(WHITE_ALONG_A_ROW, *inside, min(round(10 * bottom), 639)) > 0.3, "its lower edge"
    assert shown.run(WHITE_ALONG_A_ROW, *inside, round(10 * bottom) - 20) < 0.2, "and not all of it"


def test_a_finger_moves_the_map_on_a_phone(shown: Shown) -> None:
    shown.open(PHONE)
    canvas = shown.find("canvas")
    shown.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
    box = shown.run(
        "const b = arguments[0].getBoundingClientRect(); return [b.left, b.top, b.width, b.height]", canvas
    )
    point = {"x": box[0] + 0.1 * box[2], "y": box[1] + 0.9 * box[3]}
    for kind, points in (("touchStart", [point]), ("touchEnd", [])):
        shown.browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    shown.wait(lambda: shown.drawn().startswith("Row 4, column 1 of 4 × 4"))
