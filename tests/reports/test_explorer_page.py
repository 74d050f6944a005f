"""The explorer in a real browser: it renders, controls move the pictures, nothing is loaded, nothing complains."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PROGRAM, Page
from simulated import Simulation, simulate

from sinklab.reports import report

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium at hand: the page is not rendered")

MAP, PATHS, HEADS, SCATTER = (f".{name} canvas" for name in ("map", "paths", "heads", "scatter"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """A tab at 1280 × 800 that must not have asked for anything, nor complained."""
    browser.requests.clear()
    browser.complaints.clear()
    browser.size(1280, 800)
    yield browser
    assert browser.complaints == []
    assert browser.requests and all(address.startswith(("file://", "data:", "about:")) for address in browser.requests)
    assert len({address.partition("#")[0] for address in browser.requests if address.startswith("file://")}) == 1


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two samples with one added sink."""
    folder = tmp_path_factory.mktemp("one")
    run = simulate(folder / "run", Simulation(samples=2, added=1, steps=16, key_norms=True))
    return report(run, folder / "out", figures=(), tables=()).as_uri()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A denoiser next to an autoregressive decoder with other sizes."""
    folder = tmp_path_factory.mktemp("two")
    sizes = {
        "denoiser": Simulation(steps=16, layers=4),
        "decoder": Simulation(steps=31, layers=2, heads=6, family="autoregressive"),
    }
    runs = [simulate(folder / name, size, name=name) for name, size in sizes.items()]
    return report(runs, folder / "out", figures=(), tables=()).as_uri()


def shown(page: Page) -> dict[str, str]:
    return {name: page.pixels(name) for name in (MAP, PATHS, HEADS, SCATTER)}


def step(page: Page) -> str:
    return page.run("document.querySelector('.step-name').textContent")


def choice(page: Page, name: str) -> str:
    return page.run(f"document.querySelector('.choose-{name}').selectedOptions[0].text")


def readout(page: Page) -> str:
    return page.run("document.querySelector('.readout').innerText")


def choose(page: Page, selector: str, value: object) -> None:
    page.run(
        f"(() => {{ const box = document.querySelector('{selector}'); box.value = '{value}';"
        "for (const kind of ['input', 'change']) box.dispatchEvent(new Event(kind, { bubbles: true })); })()"
    )
    page.settle()


def test_everything_is_drawn(page, one):
    page.open(one)
    assert page.complaints == []
    for selector in (MAP, PATHS, HEADS, SCATTER):
        colours = page.run(
            f"(() => {{ const c = document.querySelector('{selector}'); const seen = new Set();"
            "const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
            "for (const pixel of d) seen.add(pixel); return seen.size; })()"
        )
        # "willReadFrequently" is advice about this very line.
        page.complaints.clear()
        assert colours > 20, selector
    assert page.run("document.querySelectorAll('.canvas-text span:not([hidden])').length") == 25
    assert page.run("document.querySelectorAll('.canvas-text .main').length") == 1
    assert page.run("document.querySelectorAll('.canvas-text .masked').length") > 3
    curves = page.run(
        "[...document.querySelectorAll('[data-chart]:has(.curve)')].map((figure) => figure.dataset.chart)"
    )
    assert set(curves) == {"share", "norms", "count", "curve", "histogram", "motion"}
    assert page.run("document.getElementById('failed').hidden")


def test_the_slider_moves_the_pictures(page, one):
    page.open(one)
    before, text = shown(page), page.run("document.querySelector('.canvas-text').innerHTML")
    choose(page, ".step", 15)
    after = shown(page)
    assert step(page) == "step 15 of 15"
    assert all(before[name] != after[name] for name in (MAP, PATHS, SCATTER))
    # The map of heads is over all steps.
    assert before[HEADS] == after[HEADS]
    assert page.run("document.querySelector('.canvas-text').innerHTML") != text
    choose(page, ".step", 8)
    assert shown(page) == before


def test_keys(page, one):
    page.open(f"{one}#step=5&layer=1&head=0")
    assert (step(page), choice(page, "layer"), choice(page, "head")) == ("step 5 of 15", "layer 1", "head 0")
    for key, expected in [
        ("ArrowRight", "step 6 of 15"),
        ("ArrowLeft", "step 5 of 15"),
        ("End", "step 15 of 15"),
        ("Home", "step 0 of 15"),
    ]:
        page.press(key)
        assert step(page) == expected
    page.run(f"document.querySelector('{MAP}').focus()")
    page.press("ArrowDown")
    assert step(page) == "step 1 of 15"
    page.press("ArrowUp")
    assert step(page) == "step 0 of 15"
    page.press("]")
    assert choice(page, "layer") == "layer 2"
    page.press("[")
    page.press("h")
    assert (choice(page, "layer"), choice(page, "head")) == ("layer 1", "head 1")
    page.press("H")
    page.press("H")
    assert choice(page, "head") == "mean of heads"
    page.press("m")
    assert choice(page, "layer") == "all layers"
    page.press("s")
    # Another sample is unpacked first.
    page.wait("document.querySelector('.choose-sample').selectedOptions[0].text === 'sample 1'")
    page.press("?")
    assert page.run("document.getElementById('help-text').open")
    page.press("?")
    assert not page.run("document.getElementById('help-text').open")


def test_playing_goes_on_to_the_last_step_and_stops(page, one):
    page.open(f"{one}#step=12")
    choose(page, "#speed", 10)
    page.press(" ")
    assert page.run("document.getElementById('play').dataset.playing") == "true"
    page.wait("document.querySelector('.step-name').textContent === 'step 15 of 15'")
    page.wait("document.getElementById('play').dataset.playing === 'false'")


def test_the_pointer_links_the_pictures(page, one):
    page.open(f"{one}#step=3&layer=0&head=0")
    before = shown(page)
    page.point(MAP, 0.7, 0.8)
    assert "step 1" in readout(page) and "position" in readout(page)
    assert page.run("document.querySelectorAll('.canvas-text .looked').length") == 1
    assert shown(page)[SCATTER] != before[SCATTER]
    assert step(page) == "step 3 of 15"
    page.point(MAP, 0.7, 0.8, click=True)
    assert step(page) in ("step 12 of 15", "step 13 of 15")
    assert page.run("document.querySelectorAll('.canvas-text .pinned').length") == 1
    page.point('.canvas-text [data-key="9"]', 0.5, 0.5)
    assert "position 8 · id 8 · words" in readout(page) and "“␣bridge” prompt" not in readout(page)


def test_the_readout_says_the_numbers_of_the_run(page, one):
    page.open(f"{one}#step=15&layer=0&head=0&key=0")
    text = readout(page)
    assert text.startswith("added sink")
    assert "key norm" in text and "value norm\n0.25" in text and "heads" in text
    # Twenty-four queries see the key: received = 24 × weight.
    received, weight = (
        float(text.split(f"{name}\n")[1].split()[0].rstrip("×")) for name in ("received", "mean weight")
    )
    assert received == pytest.approx(24 * weight / 100, rel=0.01)


def test_a_click_on_the_map_of_heads_chooses(page, one):
    page.open(one)
    page.point(HEADS, 0.35, 0.35, click=True)
    assert choice(page, "head").startswith("head ")
    chosen = choice(page, "layer"), choice(page, "head")
    page.point(HEADS, 0.35, 0.35, click=True)
    assert (choice(page, "layer"), choice(page, "head")) == (chosen[0], "mean of heads")
    page.run("document.querySelectorAll('.metrics button')[1].click()")
    page.settle()
    assert "0 static, 1 moving" in page.run("document.querySelector('.heads .note').textContent")


def test_light_and_dark(page, one):
    page.open(one)
    light = page.run("getComputedStyle(document.body).backgroundColor"), shown(page)
    page.press("t")
    dark = page.run("getComputedStyle(document.body).backgroundColor"), shown(page)
    assert light[0] == "rgb(246, 245, 241)" and dark[0] == "rgb(18, 19, 23)"
    assert all(light[1][name] != dark[1][name] for name in dark[1])
    page.size(1280, 800, dark=True)
    page.open(one)
    assert (page.run("getComputedStyle(document.body).backgroundColor"), shown(page)) == dark


def test_two_runs_side_by_side_are_linked(page, two):
    page.open(two)
    names = "[...document.querySelectorAll('.step-name')].map((name) => name.textContent)"
    assert page.run("[...document.querySelectorAll('.choose-run')].map((box) => box.value)") == ["0", "1"]
    page.press("End")
    assert page.run(names) == ["step 15 of 15", "token 30 of 30"]
    choose(page, ".step", 5)
    assert page.run(names) == ["step 5 of 15", "token 10 of 30"]
    # Layer 3 of 4 is the last: so is layer 1 of 2.
    choose(page, ".choose-layer", 3)
    assert page.run("[...document.querySelectorAll('.choose-layer')].map((box) => box.value)") == ["3", "1"]
    page.run("document.getElementById('linked').click()")
    choose(page, ".step", 0)
    assert page.run(names) == ["step 0 of 15", "token 10 of 30"]
    page.run("document.getElementById('pair').click()")
    page.wait("document.querySelectorAll('.pane').length === 1")


def test_a_decoder_shows_what_is_there_at_each_token(page, two):
    page.open(f"{two}#run=1&step=0")
    count = "document.querySelectorAll('.canvas-text span:not([hidden])').length"
    assert page.run(count) == 6
    page.press("End")
    assert page.run(count) == 23
    assert page.run("document.querySelectorAll('.canvas-text .masked').length") == 0


def test_a_long_canvas_follows_what_is_pinned(page, tmp_path):
    run = simulate(tmp_path / "run", Simulation(steps=4, layers=1, heads=1, text=1200))
    page.open(report(run, tmp_path / "out", figures=(), tables=()).as_uri())
    box = "document.querySelector('.canvas-text')"
    assert page.run(f"{box}.scrollHeight > 2 * {box}.clientHeight")
    page.point(MAP, 0.95, 0.5, click=True)
    frame, token = (
        page.run(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        for selector in (".canvas-text", ".canvas-text .pinned")
    )
    assert frame["top"] <= token["top"] and token["bottom"] <= frame["bottom"]
    assert page.run(f"{box}.scrollTop") > 0


def test_only_the_greatest_keys_of_a_head_are_said_to_be_so(page, tmp_path):
    run = simulate(tmp_path / "run", Simulation(steps=16, layers=4, heads=6, text=80))
    target = report(run, tmp_path / "out", figures=(), tables=(), megabytes=0.015)
    page.open(target.as_uri() + "#layer=1&head=2&step=3")
    note = page.run("document.querySelector('.map .note').textContent")
    assert note.startswith("The ") and note.endswith(
        "greatest keys of this head at each step; the others are below them."
    )
    page.run("document.querySelector('.canvas-text').scrollTop = 0")
    rest = page.run(
        "[...document.querySelectorAll('.canvas-text span')].findIndex((span) => !span.style.backgroundColor)"
    )
    page.point(f'.canvas-text [data-key="{rest}"]', 0.5, 0.5)
    assert "received\n< " in readout(page)
    page.press("m")
    assert page.run("document.querySelector('.map .note').textContent") == ""


@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 800, False), (390, 844, True)])
def test_it_is_readable_at(page, one, two, width, height, phone, tmp_path):
    page.size(width, height, phone=phone)
    page.open(one if width == 1280 else two)
    # Nothing is wider than the window, and on a desk the pictures stand in the first window.
    assert page.run("document.documentElement.scrollWidth") <= width
    bottoms = page.run(
        "['.player', '.map', '.heads', '.readout'].map((s) => document.querySelector(s).getBoundingClientRect().bottom)"
    )
    assert phone or max(bottoms) <= height
    fonts = page.run("getComputedStyle(document.querySelector('.canvas-text')).fontSize")
    assert float(fonts.removesuffix("px")) >= 15
    picture = page.picture(tmp_path / "page.png")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_texts_of_a_run_are_text_and_never_markup(page, make_study, tmp_path):
    evil = "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
    path: Path = report(make_study(evil[:60], folder="evil", added=1), tmp_path / "out", figures=(), tables=())
    page.open(path.as_uri())
    assert page.run("document.title") == "Where attention goes while the model writes"
    assert page.run("document.querySelectorAll('img').length") == 0
    assert "<b>man</b>" in page.run("document.querySelector('.canvas-text').textContent")


def test_without_its_script_the_page_still_says_what_was_found(browser, one):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url="about:blank")
        browser.call("Page.navigate", url=one)
        browser.wait("document.querySelector('footer') !== null")
        text = browser.run("document.body.innerText")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "static figures lie beside the page" in text
    assert "In short" in text and "the added sink receives" in text and "What was run" in text
