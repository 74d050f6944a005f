import dataclasses

import numpy as np
import pytest
from matplotlib.figure import Figure

from sinklab.reports import as_studies, heldout_loss, received_map, sink_path, sink_share, sink_tokens, value_norms
from sinklab.reports.sentences import number, percent
from sinklab.reports.style import printable

STEPS, LAYERS, TEXT, PROMPT = 12, 2, 24, 6


def lines(axes) -> dict[str, np.ndarray]:
    return {line.get_label(): np.asarray(line.get_ydata(), dtype=float) for line in axes.lines}


def test_sink_share_draws_the_shares(make_study):
    axes = sink_share([make_study("plain"), make_study("sink", added=2, share=0.4)])
    drawn = lines(axes)
    np.testing.assert_allclose(drawn["plain: greatest text position"], [30] * LAYERS, rtol=1e-3)
    np.testing.assert_allclose(drawn["sink: added sink"], [40] * LAYERS, rtol=1e-3)
    assert "plain: added sink" not in drawn


def test_value_norms_draws_the_norms(make_study):
    drawn = lines(value_norms(make_study(added=1, norm=0.25)))
    np.testing.assert_allclose(drawn["added sink"], [0.25] * LAYERS)
    np.testing.assert_allclose(drawn["other text"], [2] * LAYERS)
    np.testing.assert_allclose(drawn["text sinks"], [2] * LAYERS)


def test_received_map_draws_received_attention(make_study):
    axes = received_map(make_study(added=1, share=0.25, text_share=0.5), layer=1)
    text, added = (np.asarray(image.get_array()) for image in axes.images)
    assert text.shape == (STEPS, TEXT) and added.shape == (STEPS, 1)
    np.testing.assert_allclose(added, 0.25 * TEXT, rtol=1e-3)
    np.testing.assert_allclose(text[np.arange(STEPS), PROMPT + np.arange(STEPS)], 0.5 * TEXT, rtol=1e-3)
    # The second sample is two steps shorter; its padding is not drawn.
    assert np.asarray(received_map(make_study("b"), 0, sample=1).images[0].get_array()).shape[0] == STEPS - 2


def test_steps_of_a_cache_are_scaled_to_all_positions(make_study):
    studies = as_studies([make_study("whole", added=1), make_study("part", added=1, ran=0.25)])
    for ours, theirs in zip(studies[0].layers, studies[1].layers, strict=True):
        for field in dataclasses.fields(ours):
            np.testing.assert_allclose(getattr(theirs, field.name), getattr(ours, field.name), rtol=2e-3)
    maps = [received_map(study, 0).images[0].get_array() for study in studies]
    np.testing.assert_allclose(maps[1], maps[0], rtol=2e-3)


def test_sink_path_follows_the_moving_sink(make_study):
    axes = sink_path(make_study())
    dots = np.concatenate([np.asarray(collection.get_offsets()) for collection in axes.collections])
    dots = dots[np.argsort(dots[:, 0])]
    assert dots.tolist() == [[step, PROMPT + step] for step in range(STEPS)]
    by_state = {collection.get_label(): len(collection.get_offsets()) for collection in axes.collections}
    # At step t the positions from PROMPT + t on are masks, the greatest among them.
    assert by_state == {"prompt": 0, "masked": STEPS, "committed": 0}
    added = sink_path(make_study("sink", added=1, text_share=0.1))
    assert {c.get_label(): len(c.get_offsets()) for c in added.collections}["added sink"] == STEPS


def test_sink_tokens_draws_frequency_and_occupancy(make_study):
    study = as_studies(make_study())[0]
    axes = sink_tokens(study)
    # All sink events fall on masks; sample 0 has 12 steps and sample 1 ten, of 24 positions, 18 - t of them masks.
    masks = sum(TEXT - PROMPT - step for steps in (12, 10) for step in range(steps))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["[MASK]"]
    assert axes.patches[0].get_width() == 100
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [100 * masks / (22 * TEXT)])
    assert axes.texts[0].get_text() == f"{22 * TEXT / masks:.1f}×"


def test_heldout_draws_paired_changes_with_error_bars(make_study):
    axes = heldout_loss([make_study("a", sinks=0.5), make_study("b", leave_out=("heldout",))])
    bars = {container.get_label(): container for container in axes.containers}
    assert set(bars) == {"a: sinks hidden", "a: random columns hidden"}
    np.testing.assert_allclose(bars["a: sinks hidden"].lines[0].get_ydata(), [0.0, 0.1, 0.5])
    np.testing.assert_allclose(bars["a: random columns hidden"].lines[0].get_ydata(), [0.0, 0.01, 0.02])
    assert all(container.has_yerr for container in axes.containers)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "5"]


def test_a_table_without_paired_differences_gets_unpaired_ones(make_study):
    study = as_studies(make_study())[0]
    frame = study.heldout.drop(columns=["delta", "delta_stderr"])
    run = dataclasses.replace(study.run)
    object.__setattr__(run, "table", lambda name: frame)
    got = as_studies(run)[0].heldout
    np.testing.assert_allclose(got["delta"], study.heldout["delta"])
    np.testing.assert_allclose(got["delta_stderr"], 0.01 * np.sqrt(2))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_draw_on_given_axes(make_study, theme):
    runs = [make_study("plain"), make_study("sink", added=1)]
    figure = Figure()
    grid = figure.subplots(2, 3)
    assert sink_share(runs, grid[0, 0], theme=theme) is grid[0, 0]
    assert heldout_loss(runs, grid[0, 1], theme=theme) is grid[0, 1]
    for draw, axes in zip((value_norms, sink_tokens, sink_path), grid[1], strict=True):
        assert draw(runs[1], axes, theme=theme) is axes
    assert received_map(runs[1], 0, grid[0, 2], theme=theme) is grid[0, 2]
    figure.canvas.draw()


def test_texts_that_fonts_and_mathtext_trip_over_are_drawn(make_study):
    study = as_studies(make_study(text_share=0.3))[0]
    frame = study.tokens.assign(state="committed", text="$x_1$ 语\n")
    study.__dict__["tokens"] = frame
    axes = sink_tokens(study)
    axes.figure.canvas.draw()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["“$x_1$␣\\u8bed↵”"]
    assert printable("a b\n") == "“a␣b↵”"


def test_no_sink_events_is_drawn_as_such(make_study):
    axes = sink_tokens(make_study(text_share=0.05))
    assert [text.get_text() for text in axes.texts] == ["no sink events"]


def test_refusals(make_study):
    run = make_study(leave_out=("attention", "heldout", "tokens"))
    for draw in (sink_share, value_norms, sink_path, sink_tokens, lambda run: received_map(run, 0)):
        with pytest.raises(ValueError, match="attention"):
            draw(run)
    with pytest.raises(ValueError, match=r"needs the table heldout"):
        heldout_loss(run)
    whole = make_study("whole")
    with pytest.raises(ValueError, match=r"has layers 0 to 1: got layer=4"):
        received_map(whole, 4)
    with pytest.raises(ValueError, match=r"has samples 0 to 1: got sample=2"):
        sink_path(whole, sample=2)
    with pytest.raises(ValueError, match=r"one of light, dark: got 'drak'. Did you mean 'dark'"):
        sink_share(whole, theme="drak")


def test_numbers_are_short():
    shown = [number(value) for value in (0, 1, 12.345, 0.01234, 123456.0, 99999.0, -2.5, float("nan"))]
    assert shown == ["0", "1.00", "12.3", "0.0123", "1.23e+05", "99999", "−2.50", "–"]
    assert number(0.0123, 2) == "0.012" and number(1e-5) == "1.00e−05"
    assert percent(0.1234) == "12.3\u00a0%" and percent(float("nan")) == "–"
