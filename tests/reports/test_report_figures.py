import re
from importlib import resources

import numpy as np
import pytest
from numpy.testing import assert_allclose

from commands import cli
from pictures import page_with
from refusals import refused
from sinklab.lab.reports import NotRecorded, as_studies, table
from sinklab.lab.reports.build import WORDS, placed, svg_of
from sinklab.lab.reports.figures import (
    attention_map,
    heldout_loss,
    received_map,
    score_histogram,
    sink_paths,
    sink_share,
    sink_tokens,
    statistics,
    typical_head,
    value_norms,
)
from sinklab.lab.reports.style import printable
from sinklab.lab.reports.words import number, percent

STEPS, LAYERS, TEXT, PROMPT = 12, 2, 24, 6


@pytest.mark.slow
def test_statistics_without_a_figure_of_their_own_are_drawn_by_layer_and_step(make_study):
    run = make_study("plain")
    for name, value in (("row_entropy", 2.5), ("key_norm", 8.0)):
        axes = statistics(run, only=name)
        assert axes.get_title(loc="left") == name
        assert_allclose(axes.images[0].get_array(), np.full((LAYERS, STEPS), value))
    frame = table(run, "statistics")
    assert (
        list(frame) == ["statistic", "layer", "step", "mean", "samples"]
        and len(frame) == 3 * LAYERS * STEPS
    )
    # every other sample is two steps shorter
    assert frame.groupby("step")["samples"].max().tolist() == [2] * (STEPS - 2) + [1, 1]
    with pytest.raises(NotRecorded, match="statistic"):
        statistics(run, only="no_such")


def test_received_map_draws_received_attention(make_study):
    axes = received_map(make_study(added=1, share=0.25, text_share=0.5), layer=1)
    text, added = (np.asarray(image.get_array()) for image in axes.images)
    assert text.shape == (STEPS, TEXT) and added.shape == (STEPS, 1)
    assert_allclose(added, 0.25 * TEXT, rtol=1e-3)
    assert_allclose(text[np.arange(STEPS), PROMPT + np.arange(STEPS)], 0.5 * TEXT, rtol=1e-3)
    # The second sample is two steps shorter; its padding is not drawn.
    assert (
        np.asarray(received_map(make_study("b"), layer=0, sample=1).images[0].get_array()).shape[0]
        == STEPS - 2
    )


def test_received_map_takes_one_head_or_the_mean(make_study):
    def lopsided(sample, arrays):
        arrays["received"][:, :, 1:, PROMPT:] = 0

    run = make_study(change=lopsided)
    drawn = {
        head: np.asarray(received_map(run, layer=0, head=head).images[0].get_array())
        for head in (None, 0, 1)
    }
    assert drawn[0][0, PROMPT] == pytest.approx(7.2, rel=1e-3)
    # nothing is drawn as the floor of the scale
    assert drawn[1][0, PROMPT] == 0.5 and drawn[None][0, PROMPT] == pytest.approx(2.4, rel=1e-3)
    assert len(received_map(run).lines) == 1, "one block border"


def test_keys_that_are_not_there_yet_are_not_drawn(make_study):
    drawn = received_map(make_study(family="autoregressive")).images[0].get_array()
    assert np.ma.getmaskarray(drawn).sum(1).tolist() == [STEPS - step for step in range(STEPS)]


def test_attention_map_draws_the_map_that_was_kept(make_study):
    weights = np.full((TEXT, TEXT + 1), 0.5 / TEXT)
    weights[:, 4] = 0.5
    run = make_study(added=1, maps={"step3-layer1-head2": weights, "step12-layer0-head0": weights})
    axes = attention_map(run)
    assert axes.get_title(loc="left") == "step 3, layer 1, head 2"
    text, added = (np.asarray(image.get_array()) for image in axes.images)
    assert text.shape == (TEXT, TEXT) and added.shape == (TEXT, 1)
    assert_allclose(text[:, 3], 0.5 * (TEXT + 1), rtol=1e-3)
    assert attention_map(run, layer=0).get_title(loc="left") == "step 12, layer 0, head 0"
    with pytest.raises(NotRecorded, match=r"no such map of sample 0"):
        attention_map(run, step=5)
    with pytest.raises(NotRecorded, match="as step:layer:head: 3:5:2"):
        attention_map(run, sample=1)


def test_without_a_choice_the_head_of_median_mobility_is_shown(make_study):
    def other(sample, arrays):
        # one head stays, and holds more than the five others together
        arrays["received"][:] *= 0.5
        arrays["received"][:, 1, 2] = 0.1
        arrays["received"][:, 1, 2, 9] = 0.97 * TEXT

    staying = make_study("staying", change=other)
    assert typical_head(as_studies(staying)[0]) == (1, 2)
    assert [*sink_paths(staying).lines[-1].get_ydata()] == [9] * STEPS
    moving = sink_paths(staying, layer=0).lines[-1]
    assert [*moving.get_ydata()] == [PROMPT + step for step in range(STEPS)]


@pytest.mark.slow
def test_an_interval_needs_eight_samples(make_study):
    assert sink_share.drawn(make_study("few", samples=7))[1]["low"].isna().all()


def test_sink_tokens_draws_frequency_and_occupancy(make_study):
    study = as_studies(make_study())[0]
    axes = sink_tokens(study)
    # All sink events fall on masks; sample 0 has 12 steps and sample 1 ten, of 24 positions, 18 - t
    # of them masks.
    masks = sum(TEXT - PROMPT - step for steps in (12, 10) for step in range(steps))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["[MASK]"]
    assert axes.patches[0].get_width() == 100
    assert_allclose(axes.lines[0].get_xdata(), [100 * masks / (22 * TEXT)])
    assert axes.texts[0].get_text() == f"{22 * TEXT / masks:.1f}×"


def test_texts_that_fonts_and_mathtext_trip_over_are_drawn(make_study):
    def prompted(sample, arrays):
        arrays["received"][:] = 0.1
        arrays["received"][..., 2] = 0.9 * TEXT

    axes = sink_tokens(make_study(words=["$x_1$ 语\n"], change=prompted))
    axes.figure.canvas.draw()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["“$x_1$␣\\u8bed↵”"]
    assert printable("a b\n") == "“a␣b↵”"


def test_refusals(make_study):
    with pytest.raises(NotRecorded, match=r"needs a run of `sinklab curve`"):
        heldout_loss(make_study())
    bare = make_study("bare", leave_out=("value_norm", "output_norm"))
    with pytest.raises(NotRecorded, match="with the statistic value_norm"):
        value_norms(bare)
    whole = make_study("whole", recorded_layers=[3, 4])
    refused(r"one of 3, 4, but is 0", received_map, whole, layer=0)
    refused(r"one of 0, 1, 2, but is 3", sink_paths, whole, layer=3, head=3)
    refused("the sample of .* one of 0, 1, but is 2", sink_paths, whole, sample=2)


def test_numbers_are_short():
    shown = [
        number(value)
        for value in (0, 1, 12.345, 0.01234, 123456.0, 99999.0, -2.5, float("nan"), np.inf)
    ]
    assert shown == ["0", "1.00", "12.3", "0.0123", "1.23e+05", "99999", "−2.50", "–", "∞"]
    assert number(0.0123, 2) == "0.012" and number(1e-5) == "1.00e−05"
    assert percent(0.1234) == "12.3\u00a0%" and percent(float("nan")) == "–"


def test_the_threshold_stays_in_the_histogram_where_no_token_comes_near_it(make_study):
    axes = score_histogram(make_study(text_share=1 / 24))
    low, high = axes.get_xlim()
    assert low <= 1 and high > 4
    # a label outside would leave the axes no room, which is a warning
    axes.figure.canvas.draw()


@pytest.mark.slow
def test_the_command_draws_figures_with_their_numbers(tmp_path, capsys):
    """Those of a curve, which its study registers."""
    folder = resources.files("sinklab.lab.checkpoints").joinpath("packaged", "curves", "tiny")
    assert cli(f"figures {folder} --out {tmp_path / 'out'} --only masking_curve") == 0
    names = {f"masking_curve.{form}" for form in ("pdf", "png", "csv")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert capsys.readouterr().out.endswith("out (3 files)\n")


@pytest.mark.slow
def test_a_page_shows_the_drawing_of_the_figure(make_study, tmp_path):
    runs = as_studies([make_study("plain"), make_study("sink", added=1)])
    html = page_with("sink_share", of=runs, out=tmp_path).read_text("utf-8")
    title = WORDS["figures"]["study"]["sink_share"]
    assert placed(svg_of("sink_share", runs), "sink_share", title) in html
    parts = re.findall(r' id="([^"]+)"', html)
    assert len(parts) == len(set(parts))
