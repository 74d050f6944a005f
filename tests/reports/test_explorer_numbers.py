"""What the explorer says and draws, recomputed from the arrays of the run folder."""

import re
from pathlib import Path

import numpy as np
import pytest
from browsing import MAP, readout
from simulated import simulate

from pictures import page_with
from sinklab.lab.records import open_run
from sinklab.lab.reports.style import THEMES

# What the pictures show, recomputed from the arrays of the run folder. T steps, L layers, H heads,
# K keys.


def arrays(run, sample=0):
    """As recorded, in double precision; ``even`` is received attention over an even share."""
    names = ("received", "visible", "positions", "value_norm")
    found = {name: run.array("attention", name, sample).astype(float) for name in names}
    found["weight"] = found["received"] / found["visible"][:, None, None]
    return found | {"even": found["weight"] * found["positions"][:, None, None, None]}


def said(page, label):
    return float(re.search(rf"{label}\n([0-9.e−-]+)", readout(page)).group(1).replace("−", "-"))


@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize(("layer", "head"), [(1, 2), (0, -1), (-1, -1)])
def test_the_readout_says_what_numpy_finds_in_the_run_folder(page, two, run, layer, head):
    name = ("denoiser", "decoder")[run]
    found = arrays(open_run(Path(two.removeprefix("file://")).parents[1] / name))
    layers = slice(None) if layer < 0 else [layer]
    heads = slice(None) if head < 0 else [head]
    main_TLH = np.nanargmax(found["weight"], axis=-1)
    page.open(two)
    for step, key in ((3, 0), (9, 4), (15, 7)):
        page.show(f"run={run}&step={step}&layer={layer}&head={head}&key={key}")
        expected = found["even"][step][layers][:, heads, key].mean()
        # Codes are within 1.7 %, and three digits within 0.5 %.
        assert said(page, "received") == pytest.approx(expected, rel=0.022), (step, key)
        weight = found["weight"][step][layers][:, heads, key].mean()
        assert said(page, "mean weight") == pytest.approx(100 * weight, rel=0.022), (step, key)
        norm = found["value_norm"][step][layers][:, key].mean()
        assert said(page, "value norm") == pytest.approx(norm, rel=0.015), (step, key)
        of = main_TLH[step][layers]
        assert f"main sink of\n{(of == key).sum()} of {of.size} heads" in readout(page)


def pixel(page, selector, x, y):
    """Colour of a canvas at a place in CSS pixels."""
    rgb = page.run(
        f"[...document.querySelector('{selector}').getContext('2d').getImageData({round(x)}, "
        f"{round(y)}, 1, 1).data]"
    )
    page.complaints.clear()
    return tuple(rgb[:3])


def extent(page, selector):
    return tuple(
        page.run(f"(c => [c.clientWidth, c.clientHeight])(document.querySelector('{selector}'))")
    )


def on_scale(value, high):
    """The colour of a value on the logarithmic scale from 1 to ``high``."""
    stops = np.array(
        [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in THEMES["light"].scale]
    )
    at = np.clip(np.log(max(value, 1)) / np.log(high), 0, 1) * (len(stops) - 1)
    return np.array([np.interp(at, range(len(stops)), stops[:, channel]) for channel in range(3)])


def test_the_pictures_show_what_numpy_finds_in_the_run_folder(page, one):
    run = open_run(Path(one.removeprefix("file://")).parents[1] / "run")
    found, other = arrays(run), arrays(run, 1)
    steps, _, _, keys = found["even"].shape
    page.open(f"{one}#step=5&layer=1&head=2&key=3")
    # One colour scale for everything on the page.
    high = 2.0 ** np.ceil(np.log2(max(found["even"].max(), other["even"].max())))
    width, height = extent(page, MAP)
    # Left of the text stands the added sink, 12 pixels wide, and a gap of 5.
    across = (width - 34 - 6 - 12 - 5) / (keys - 1)
    for step, key in ((0, 0), (2, 9), (11, 20), (15, 13)):
        x = 40 if key == 0 else 34 + 17 + (key - 0.5) * across
        shown_colour = pixel(page, MAP, x, 6 + (step + 0.5) / steps * (height - 26))
        expected = on_scale(found["even"][step, 1, 2, key], high)
        assert np.abs(shown_colour - expected).max() < 6, (step, key)


def test_outlines_stand_where_numpy_finds_the_main_sinks(page, two):
    found = arrays(open_run(Path(two.removeprefix("file://")).parents[1] / "denoiser"))
    page.open(f"{two}#run=0&step=5&layer=1&head=2")
    width, height = extent(page, MAP)
    steps, _, _, keys = found["weight"].shape
    main_T = found["weight"][:, 1, 2].argmax(-1)
    # prompt, masked, just committed, committed, as in style.css
    states = [(138, 144, 153), (47, 143, 196), (0, 158, 115), (0, 80, 125)]
    # on a square, a triangle, a diamond and a circle of radius 5
    corners = [(4.25, 0), (0, -5), (5.5, 0), (5, 0)]

    def outlined(step, key):
        x = 34 + (width - 40) * (key + 0.5) / keys
        y = 6 + (height - 26) * (step + 0.5) / steps
        seen = [pixel(page, MAP, x + across, y + down) for across, down in corners]
        return min(np.abs(np.subtract(dot, state)).max() for dot in seen for state in states) < 30

    # the step that is shown and the key that is looked at have frames
    for step in (0, 2, 9, 13):
        assert outlined(step, main_T[step]), step
        assert not outlined(step, (main_T[step] + keys // 2) % keys), step


def test_the_map_of_heads_says_what_numpy_finds_in_the_run_folder(page, one):
    # Numbers of whole runs are over both samples.
    run = open_run(Path(one.removeprefix("file://")).parents[1] / "run")
    mean_LH = np.mean([arrays(run, part)["weight"].max(-1).mean(0) for part in (0, 1)], axis=0)
    page.open(one)
    for layer, head in ((0, 0), (2, 3)):
        page.show(f"layer={layer}&head={head}")
        note = page.run("document.querySelector('.heads .note').textContent")
        shown_weight = float(re.search(rf"Layer {layer}, head {head}: ([0-9.]+) %", note).group(1))
        assert shown_weight == pytest.approx(100 * mean_LH[layer, head], rel=0.006)
    low, high = (
        float(text)
        for text in re.search(r"from ([0-9.]+) to ([0-9.]+) %, logarithmic", note).groups()
    )
    assert (low, high) == (
        pytest.approx(100 * mean_LH.min(), rel=0.006),
        pytest.approx(100 * mean_LH.max(), rel=0.006),
    )


def test_each_of_several_added_sinks_has_a_place_of_its_own(page, tmp_path):
    run = simulate(tmp_path / "run", added=3, layers=1)
    page.open(page_with(of=run, out=tmp_path / "out").as_uri())
    width = extent(page, MAP)[0]
    wide = max(12, (width - 40) / arrays(run)["even"].shape[-1])
    for sink in (0, 1, 2):
        page.point(MAP, (34 + wide * (sink + 0.5)) / width, 0.5)
        assert readout(page).startswith(f"added sink {sink + 1}")
