"""The explorer in a real browser: it renders, and controls move the pictures."""

import pytest
from browsing import CELLS, HEADS, MAP, choice, choose, readout, shown, step
from simulated import REMOVALS, simulate, uneven

from pictures import page_with


def test_everything_is_drawn(page, one):
    page.open(one)
    assert page.complaints == []
    colours = page.run(
        f"(() => {{ const c = document.querySelector('{MAP}'); const seen = new Set();"
        "const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, "
        "c.height).data.buffer);for (const pixel of d) seen.add(pixel); return seen.size; })()"
    )
    # "willReadFrequently" is advice about this very line.
    page.complaints.clear()
    assert colours > 20
    assert len(set(page.run(CELLS))) > 1
    assert page.run("document.querySelectorAll('.canvas-text span:not([hidden])').length") == 25
    assert page.run("document.querySelectorAll('.canvas-text .main').length") == 1
    assert page.run("document.querySelectorAll('.canvas-text .masked').length") > 3
    charts = page.run(
        "[...document.querySelectorAll('article:has(svg.figure)')].map((card) => card.id)"
    )
    # the answers of the story have no name
    assert charts[:4] == ["", "", "sink_share", "value_norms"] and charts[-1] == "statistic-3"
    assert len(charts) == 11
    # colours and letters are those of the page
    line = "getComputedStyle(document.querySelector('#sink_share .figure text'))"
    light = page.run(f"{line}.fill")
    assert page.run(f"{line}.fontFamily") == page.run("getComputedStyle(document.body).fontFamily")
    page.press("t")
    assert page.run(f"{line}.fill") != light
    assert page.run("document.getElementById('failed').hidden")


def test_the_slider_moves_the_pictures(page, one):
    page.open(one)
    before, text = shown(page), page.run("document.querySelector('.canvas-text').innerHTML")
    choose(page, ".step", 15)
    after = shown(page)
    assert step(page) == "step 15 of 15"
    assert before[MAP] != after[MAP]
    # The map of heads is over all steps.
    assert before[HEADS] == after[HEADS]
    assert page.run("document.querySelector('.canvas-text').innerHTML") != text
    choose(page, ".step", 8)
    assert shown(page) == before


def test_keys(page, one):
    page.open(f"{one}#step=5&layer=1&head=0")
    assert (step(page), choice(page, "layer"), choice(page, "head")) == (
        "step 5 of 15",
        "layer 1",
        "head 0",
    )
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
    assert page.run("document.getElementById('help-text').matches(':popover-open')")
    page.press("?")
    assert not page.run("document.getElementById('help-text').matches(':popover-open')")


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
    assert shown(page)[MAP] != before[MAP]
    assert step(page) == "step 3 of 15"
    page.point(MAP, 0.7, 0.8, click=True)
    assert step(page) in ("step 12 of 15", "step 13 of 15")
    assert page.run("document.querySelectorAll('.canvas-text .pinned').length") == 1
    page.point('.canvas-text [data-key="9"]', 0.5, 0.5)
    assert "position 8 · id 8 · words" in readout(page) and "“␣bridge” prompt" not in readout(page)


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


def test_two_runs_side_by_side_are_linked(page, two):
    page.open(two)
    names = "[...document.querySelectorAll('.step-name')].map((name) => name.textContent)"
    assert page.run("[...document.querySelectorAll('.choose-run')].map((box) => box.value)") == [
        "0",
        "1",
    ]
    page.press("End")
    assert page.run(names) == ["step 15 of 15", "token 30 of 30"]
    choose(page, ".step", 5)
    assert page.run(names) == ["step 5 of 15", "token 10 of 30"]
    # Layer 3 of 4 is the last: so is layer 1 of 2.
    choose(page, ".choose-layer", 3)
    assert page.run("[...document.querySelectorAll('.choose-layer')].map((box) => box.value)") == [
        "3",
        "1",
    ]
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
    assert page.run(count) == 36
    assert page.run("document.querySelectorAll('.canvas-text .masked').length") == 0


def test_a_long_canvas_follows_what_is_pinned(page, tmp_path):
    run = simulate(tmp_path / "run", steps=4, layers=1, heads=1, text=1200)
    page.open(page_with(of=run, out=tmp_path / "out").as_uri())
    box = "document.querySelector('.canvas-text')"
    assert page.run(f"{box}.scrollHeight > 2 * {box}.clientHeight")
    page.point(MAP, 0.95, 0.5, click=True)
    frame, token = (
        page.run(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        for selector in (".canvas-text", ".canvas-text .pinned")
    )
    assert frame["top"] <= token["top"] and token["bottom"] <= frame["bottom"]
    assert page.run(f"{box}.scrollTop") > 0


def test_a_floor_of_single_heads_is_said(page, tmp_path):
    run = simulate(tmp_path / "run", steps=16, layers=4, heads=6, text=80, change=uneven)
    target = page_with(of=run, out=tmp_path / "out", megabytes=0.015)
    page.open(target.as_uri() + "#layer=1&head=2&step=3")
    note = page.run("document.querySelector('.map .note').textContent")
    assert note.startswith("The page has what is above ") and note.endswith("× in this head.")
    page.run("document.querySelector('.canvas-text').scrollTop = 0")
    rest = page.run(
        "[...document.querySelectorAll('.canvas-text span')].findIndex((span) => "
        "!span.style.backgroundColor)"
    )
    page.point(f'.canvas-text [data-key="{rest}"]', 0.5, 0.5)
    assert "received\n< " in readout(page)
    page.press("m")
    assert page.run("document.querySelector('.map .note').textContent") == ""


def test_a_link_of_the_story_shows_what_it_says(page, one):
    page.open(one)
    link = page.run("document.querySelectorAll('.story a')[1].getAttribute('href')")
    page.run("document.querySelectorAll('.story a')[1].click()")
    page.settle()
    wanted = dict(field.split("=") for field in link[1:].split("&"))
    assert (choice(page, "layer"), choice(page, "head")) == (
        f"layer {wanted['layer']}",
        f"head {wanted['head']}",
    )
    assert page.run("document.getElementById('explorer').getBoundingClientRect().top") < 200
    # what stands in one card is explained where it first stands
    assert page.run("document.querySelector('.story abbr').title").startswith(
        "A token that receives more than"
    )


def test_the_end_is_the_finished_text(page, one):
    page.open(one)
    assert page.run("document.querySelector('.finished').hidden")
    choose(page, ".step", 15)
    words = page.run("document.querySelector('.finished').textContent")
    assert words.startswith("After the last step: ") and "stormy" in words


def test_linked_panes_follow_to_the_same_sample_and_position(page, tmp_path):
    runs = [
        simulate(tmp_path / name, name, steps=6, added=index) for index, name in enumerate("ab")
    ]
    page.open(page_with(of=runs, out=tmp_path / "out").as_uri())
    page.press("s")
    page.press("j")
    samples = "[...document.querySelectorAll('.choose-sample')].map((box) => box.value)"
    assert page.run(samples) == ["1", "1"]
    pinned = page.run(
        "[...document.querySelectorAll('.canvas-text .pinned')].map((span) => "
        "Number(span.dataset.key))"
    )
    assert len(pinned) == 2 and pinned[1] == pinned[0] + 1, (
        "the added sink of the second run stands in front"
    )


def test_the_sample_asked_for_last_is_shown_though_it_is_there_first(page, one):
    page.open(one)
    page.run(
        "(() => { const box = document.querySelector('.choose-sample'); for (const value of [1, "
        "0]) { box.value = value; box.dispatchEvent(new Event('change')); } })()"
    )
    page.settle()
    assert choice(page, "sample") == "sample 0"


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """A run, and the same attention with keys that were blocked."""
    folder = tmp_path_factory.mktemp("edited")
    tables = {"a": {}, "b": {"removals": REMOVALS}}
    runs = [simulate(folder / name, heads=8, whole=whole) for name, whole in tables.items()]
    return page_with(of=runs, out=folder / "out").as_uri()


@pytest.mark.parametrize("dark", [False, True])
def test_blocked_keys_are_hatched_and_said(page, edited, dark):
    blocked = (
        "[...document.querySelectorAll('.canvas-text .blocked')].map((span) => "
        "Number(span.dataset.key))"
    )
    note = "document.querySelector('.map .note').textContent"
    legend = "getComputedStyle(document.querySelector('.key .blocked')).display"
    page.size(1440, 900, dark=dark)
    page.open(f"{edited}#run=0&step=4&layer=1&head=2&key=5")
    assert page.run(blocked) == [] and page.run(note) == "" and page.run(legend) == "none"
    plain = page.pixels(MAP)
    page.open(f"{edited}#run=1&step=4&layer=1&head=2&key=5")
    assert page.run(note) == "Hatched: blocked in this head at this step."
    assert page.pixels(MAP) != plain and page.run(legend) != "none"
    for width in (1440, 390):
        page.size(width, 900, phone=width == 390, dark=dark)
        said = "this key\nblocked in this head at this step"
        assert page.run(blocked) == [5, 7] and said in readout(page)
    page.press("ArrowRight")
    assert page.run(blocked) == [7] and "this key" not in readout(page)
    page.press("ArrowLeft")
    # of eight heads one lost it: said, and not hatched
    page.press("m")
    assert page.run(blocked) == [] and "blocked in 1 of 8 heads at this step" in readout(page)
    assert page.run(note) == "No key was blocked in at least half of these 8 heads."
