"""Reports of training runs: the numbers are chosen here, so figures, sentences and tables must give
them back.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from numpy.testing import assert_allclose
from test_report_page import read

from refusals import refused
from sinklab.lab.analysis import mean_over
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.reports import (
    NotRecorded,
    as_shown,
    draw_all,
    figures_of,
    report,
    table,
)
from sinklab.lab.reports.figures import (
    sink_emergence,
    training_loss,
    value_norms,
)
from sinklab.lab.reports.style import THEMES
from sinklab.lab.reports.tables import over_seeds
from sinklab.lab.reports.training import _over_rows, first_for_good

STEPS = (0, 10, 20, 30)
ROWS = 16


def history():
    nan = math.nan
    return {
        "step": [10, 20, 20, 30],
        "tokens": [1000, 2000, 2000, 3000],
        "loss": [6.0, 5.0, nan, 4.0],
        "heldout_loss": [nan, nan, 5.5, nan],
        "lr": [1e-3, 5e-4, nan, 1e-4],
        "grad_norm": [2.0, 1.0, nan, 1.5],
        "seconds": [1.0, 2.0, 2.5, 3.0],
    }


def monitor(added, share, mobility):
    """Two layers of which the second has all shares doubled; half of all heads have a sink from
    step 20 on.
    """
    rows = []
    for step, value in zip(STEPS, share, strict=True):
        held = 0.25 if step < 20 else 0.75
        for layer in (-1, 0, 1):
            factor = {-1: 1.0, 0: 2 / 3, 1: 4 / 3}[layer]
            rows.append(
                {
                    "step": step,
                    "causal": False,
                    "layer": layer,
                    "added": added,
                    "even_share": added / (added + 24),
                    "sink_share": factor * value if added else 0.0,
                    "top_text_share": 0.2,
                    "sinks": 2.0,
                    "text_sinks": 1.5,
                    "main_none": 1 - held,
                    "mobility": mobility,
                    "value_added": 0.5 if added else math.nan,
                    "value_sink": 1.5,
                    "value_other": 2.0,
                }
            )
    return pd.DataFrame(rows).to_dict("list")


def made(
    folder,
    *,
    added=0,
    share=(0.01, 0.2, 0.05, 0.3),
    mobility=0.1,
    loss=4.0,
    leave_out=(),
    seed=0,
    **settings,
):
    """A run folder; held-out rows lie evenly from ``loss`` - 1 to ``loss`` + 1."""
    model = {"name": folder.name, "family": "diffusion", "data_sha256": "text", "gate": "none"}
    model |= {"sink_kind": "token" if added else "none", "sink_count": added, "sink_side": "front"}
    settings = {"steps": 30, "seed": seed, "out": str(folder), "sink_count": added, **settings}
    with RunWriter(folder, kind="training", model=model, settings=settings, seed=seed) as run:
        tables: dict[str, Any] = {
            "history": history(),
            "monitor": monitor(added, share, mobility),
            "heldout": {
                "parameters": [10],
                "loss": [loss],
                "bits_per_byte": [2.0],
                "tokens": [10],
                "bytes": [40],
            },
            "heldout_rows": {
                "row": list(range(ROWS)),
                "loss": list(loss + np.linspace(-1, 1, ROWS)),
                "tokens": [10] * ROWS,
            },
        }
        for name, columns in tables.items():
            if name not in leave_out:
                run.table(name, columns)
    return open_run(folder)


@pytest.fixture
def pair(tmp_path):
    return [made(tmp_path / "bare"), made(tmp_path / "one", added=1, mobility=0.8, loss=3.9)]


def page_alone(runs, out):
    return read(report(runs, out, tables=False))


def test_the_loss_has_the_interval_of_its_rows(pair, tmp_path):
    plain, sink = as_shown(pair)
    assert plain.loss is not None and plain.loss.samples == ROWS
    expected = mean_over(4 + np.linspace(-1, 1, ROWS))
    assert_allclose([plain.loss.value, *plain.loss.interval], [4, *expected.interval])
    # of rows of unlike length it is the loss per token, as the table `heldout` has it
    loss_R, tokens_R = pd.Series([1.0, 2.0, 4.0] * 4), pd.Series([1, 1, 2] * 4)
    unlike = _over_rows(loss_R, tokens_R)
    assert unlike.value == pytest.approx(2.75) and unlike.low < 2.75 < unlike.high
    # paired, the rows differ by a constant
    apart = sink.against(plain)
    assert_allclose([apart.value, apart.low, apart.high], -0.1, atol=1e-9)
    bare = as_shown(made(tmp_path / "no-rows", leave_out=("heldout_rows",)))[0]
    assert bare.loss is not None and bare.loss.value == 4 and math.isnan(bare.loss.low)
    assert bare.against(plain) is None
    broken = as_shown(made(tmp_path / "unfinished", leave_out=("heldout_rows", "heldout")))[0]
    assert broken.loss is not None and broken.loss.value == 5.5
    assert (
        as_shown(made(tmp_path / "none", leave_out=("heldout_rows", "heldout", "history")))[0].loss
        is None
    )


def test_a_takeover_must_last(pair, tmp_path):
    plain, sink = as_shown(pair)
    # twice an even share is 0.08: 0.2 at step 10 is lost again at step 20
    assert (plain.takeover, sink.takeover) == (None, 30)
    assert (plain.emergence, sink.emergence) == (20, 20)
    never, always = (
        as_shown(made(tmp_path / name, added=1, share=share))[0]
        for name, share in (("never", (0.3, 0.3, 0.3, 0.01)), ("always", (0.3,) * 4))
    )
    assert (never.takeover, always.takeover) == (None, 0)
    assert first_for_good(pd.Series([1, 2, 3]), pd.Series([True, False, True])) == 3


@pytest.mark.slow
def test_a_variant_is_judged_over_seeds(tmp_path):
    plain = [made(tmp_path / f"p{seed}", seed=seed, loss=4 + 0.1 * seed) for seed in range(6)]
    for name, gaps, word in (
        ("worse", (0.1, 0.12, 0.09, 0.11, 0.1, 0.08), "worse"),
        ("even", (0.1, -0.12, 0.09, -0.11, 0.1, -0.08), "inconclusive"),
    ):
        more = [
            made(tmp_path / f"{name}{seed}", added=1, seed=seed, loss=4 + 0.1 * seed + gaps[seed])
            for seed in range(6)
        ]
        (row,) = over_seeds(as_shown([*plain, *more])).to_dict("records")
        # each is held against the plain run of its own seed
        assert (row["variant"], row["seeds"], row["verdict"]) == ("sink", 6, word)
        assert row["mean"] == pytest.approx(np.mean(gaps)) and row["low"] < row["mean"]
    # without a plain run of its seed none stands in for it
    assert over_seeds(as_shown([plain[0], *more[1:]])).empty
    # a single seed has the interval of its rows, and no verdict
    (row,) = over_seeds(as_shown([plain[0], more[0]])).to_dict("records")
    assert row["seeds"] == 1 and row["verdict"] == "takes 6 seeds"


def test_repeats_share_their_look(tmp_path):
    runs = [
        made(tmp_path / "p0", seed=0),
        made(tmp_path / "p1", seed=1, loss=4.2),
        made(tmp_path / "s0", added=2, seed=0, loss=4.1, share=(0.3,) * 4),
        made(tmp_path / "s1", added=2, seed=1),
    ]
    axes = sink_emergence(runs)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["plain", "2 sinks", "greatest text position", "added sink"]
    colours = [line.get_color() for line in axes.lines[:3]]
    assert colours[0] == colours[1] != colours[2]
    # with another learning rate a variant alone does not say which runs are repeats
    other = [*runs, made(tmp_path / "p2", lr=1.0)]
    assert [run.repeats for run in as_shown(other)] == ["p0", "p1", "s0", "s1", "p2"]


def curve(axes, colour, style):
    """The one line of this colour and style that has points."""
    (line,) = (
        line
        for line in axes.lines
        if to_hex(line.get_color()) == colour.lower()
        and line.get_linestyle() == style
        and len(line.get_xdata()) > 1
    )
    return np.asarray(line.get_ydata(), dtype=float).tolist()


def test_curves_draw_what_was_recorded(pair):
    plain, sink = THEMES["light"].lines[:2]
    axes = sink_emergence(pair)
    assert curve(axes, sink, "-") == pytest.approx([1, 20, 5, 30])
    assert curve(axes, plain, "--") == pytest.approx([20] * 4)
    assert curve(value_norms(pair), sink, "-.") == [0.5] * 2
    axes = training_loss(pair)
    assert curve(axes, plain, ":") == [6.0, 5.0, 4.0]
    assert axes.get_ylim()[0] < 4 < 5.5 < axes.get_ylim()[1]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_one_page_that_loads_and_runs_nothing(pair, tmp_path):
    target = report(pair, tmp_path / "out", tables=False)
    html, page = target.read_text("utf-8"), read(target)
    assert "script-src 'none'; style-src 'unsafe-inline'; img-src data:;" in html
    assert page.scripts == [] and page.addresses == ["data:,"] and "$" not in page.content


@pytest.mark.usefixtures("no_pictures")
def test_names_are_escaped_and_what_is_missing_is_said(tmp_path):
    run = made(tmp_path / "<b>bold", leave_out=("monitor", "heldout", "heldout_rows"))
    page = page_alone(run, tmp_path / "out")
    assert "<b>bold" in page.content and "5.500" in page.content and "b" not in page.tags
    empty = made(tmp_path / "empty", leave_out=("monitor", "heldout", "heldout_rows", "history"))
    assert "How the runs came out" in page_alone(empty, tmp_path / "out-2").content


def test_figures_that_need_a_monitor_say_so(tmp_path):
    run = made(tmp_path / "unwatched", leave_out=("monitor",))
    with pytest.raises(NotRecorded, match="train with --monitor-every"):
        sink_emergence(run)
    written, skipped = draw_all(run, tmp_path / "figures", ("svg",))
    assert {path.name for path in written} == {"training_loss.svg", "training_loss.csv"}
    assert set(skipped) == set(figures_of("training")) - {"training_loss"}


@pytest.mark.usefixtures("no_pictures")
def test_tables_lie_beside_the_page(pair, tmp_path):
    folder = report(pair, tmp_path / "out").parent
    outcome = pd.read_csv(folder / "tables" / "outcome.csv", index_col="run")
    assert outcome.loc["one", "takeover_step"] == 30 and math.isnan(
        outcome.loc["bare", "takeover_step"]
    )
    assert outcome["variant"].to_dict() == {"bare": "plain", "one": "sink"}
    assert_allclose(
        outcome.loc["one", ["heldout_loss", "sink_share", "value_added"]], [3.9, 0.3, 0.5]
    )
    assert len(pd.read_csv(folder / "tables" / "monitor.csv")) == 2 * 3 * len(STEPS)
    assert len(table(pair[0], "history")) == 4
    refused("history.*'outcom'", table, pair[0], "outcom")


def test_runs_of_two_kinds_are_not_mixed(pair, make_study, tmp_path):
    mixed = [make_study("study"), pair[0]]
    refused(r"'study': .* of kind 'training'", partial(report, out=tmp_path / "out"), mixed)
    refused(r"'training': .* kind 'study'", sink_emergence, mixed[0])
    refused("at least one run", as_shown, [])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "plain"),
        ({"sink_kind": "token", "sink_count": 1}, "sink"),
        ({"sink_kind": "zero", "sink_count": 1}, "zero-value sink"),
        ({"sink_kind": "token", "sink_count": 4}, "4 sinks"),
        ({"sink_kind": "token", "sink_count": 1, "sink_side": "end"}, "sink at the end"),
        ({"sink_kind": "kv", "sink_count": 2, "gate": "elementwise"}, "2 key/value sinks and gate"),
    ],
)
def test_variants_have_names(tmp_path, model, words):
    with RunWriter(tmp_path / "run", kind="training", model=model, settings={}, seed=0):
        pass
    assert as_shown(open_run(tmp_path / "run"))[0].variant == words
