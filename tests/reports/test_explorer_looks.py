"""The explorer on desks, phones and paper, light and dark."""

from functools import cache

import pytest
from browsing import shown
from simulated import simulate

from pictures import page_with


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


@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 800, False), (390, 844, True)])
def test_it_is_readable_at(page, one, two, width, height, phone):
    page.size(width, height, phone=phone)
    page.open(one if width == 1280 else two)
    # Nothing is wider than the window, and on a desk the pictures stand in one window, below the
    # story.
    assert page.run("document.documentElement.scrollWidth") <= width
    page.run("document.getElementById('explorer').scrollIntoView()")
    bottoms = page.run(
        "['.player', '.map', '.heads', '.readout'].map((s) => "
        "document.querySelector(s).getBoundingClientRect().bottom)"
    )
    assert phone or max(bottoms) <= height
    fonts = page.run("getComputedStyle(document.querySelector('.canvas-text')).fontSize")
    assert float(fonts.removesuffix("px")) >= 15


def test_paper_is_white(page, one):
    page.size(1280, 800, dark=True)
    page.open(one)
    dark = shown(page)
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    page.settle()
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(246, 245, 241)"
    assert page.run("getComputedStyle(document.querySelector('.bar')).display") == "none"
    paper = shown(page)
    assert all(paper[name] != dark[name] for name in dark)
    page.call("Emulation.setEmulatedMedia", media="", features=[])


@pytest.fixture(scope="module")
def of_length(tmp_path_factory):
    """The page of a text of so many tokens."""

    @cache
    def of(text):
        folder = tmp_path_factory.mktemp("text")
        run = simulate(folder / "run", steps=6, heads=2, text=text)
        return page_with(of=run, out=folder / "out").as_uri()

    return of


@pytest.mark.parametrize(("width", "height"), [(390, 844), (820, 1100), (1280, 800), (1920, 1080)])
@pytest.mark.parametrize("text", [24, 150, 260])
def test_no_panel_covers_another(page, of_length, width, height, text):
    page.size(width, height)
    page.open(of_length(text))
    boxes = page.run(
        "[...document.querySelectorAll('.panel, .pane-bar, .readout, .shown')]"
        ".map((panel) => panel.getBoundingClientRect().toJSON())"
    )
    for place, one in enumerate(boxes):
        assert one["width"] > 150 and one["height"] > 15 and one["right"] <= width
        for other in boxes[place + 1 :]:
            beside = one["right"] <= other["left"] or other["right"] <= one["left"]
            assert beside or one["bottom"] <= other["top"] or other["bottom"] <= one["top"], (
                one,
                other,
            )
    if width > 1020:
        # The columns of pictures end together.
        bottoms = page.run(
            "['.map', '.heads'].map((s) => "
            "Math.round(document.querySelector(s).getBoundingClientRect().bottom))"
        )
        assert bottoms[0] == bottoms[1]


@pytest.mark.parametrize("dark", [False, True])
def test_tokens_can_be_read_on_every_background(page, one, dark):
    page.size(1280, 800, dark=dark)
    page.open(one)
    # Contrast as WCAG 2 defines it, of ink and background of every token at every step.
    worst = page.run("""(async () => {
      const light = (css) => {
        const parts = css.match(/[0-9.]+/g).slice(0, 3).map((part) => part / 255);
        const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = parts.map(linear);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const slider = document.querySelector(".step");
      let worst = 99, seen = new Set();
      for (let step = 0; step < 16; step++) {
        slider.value = step;
        slider.dispatchEvent(new Event("input"));
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        for (const span of document.querySelectorAll(".canvas-text span:not(.masked)")) {
          if (getComputedStyle(span).opacity !== "1") worst = 0;
          if (!span.style.backgroundColor) continue;
          const [one, other] = [light(span.style.color), light(span.style.backgroundColor)];
          seen.add(span.style.backgroundColor);
          worst = Math.min(worst, (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05));
        }
      }
      return [worst, seen.size];
    })()""")
    assert worst[0] >= 4.5 and worst[1] > 10


def test_a_phone_shows_one_run_and_its_colour_scale(page, two):
    page.size(390, 844, phone=True)
    page.open(two)
    assert page.run("document.querySelectorAll('.pane').length") == 1
    box = page.run("document.getElementById('scale').getBoundingClientRect().toJSON()")
    assert box["width"] > 150 and box["bottom"] <= 844
    bar = page.run("document.querySelector('.bar').getBoundingClientRect().toJSON()")
    assert bar["height"] < 110
    # The last column of the token table says the most.
    ends = page.run(
        "[...document.querySelectorAll('#tokens .scroll')].map((box) => box.scrollWidth - "
        "box.clientWidth)"
    )
    assert max(ends) == 0
    page.run("document.getElementById('pair').click()")
    page.wait("document.querySelectorAll('.pane').length === 2")
