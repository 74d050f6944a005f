"""Every figure shows the numbers that are frozen in figure_numbers.json."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from test_report_training import made

from curves import costed
from sinklab.lab.records import open_run
from sinklab.lab.registry import figures

FROZEN = json.loads(Path(__file__).with_name("figure_numbers.json").read_text("utf-8"))
RENAMED = {"sink_path_of_head": "sink_paths", "trained_share": "sink_share"}
"""figures that are drawn by another since the numbers were frozen"""


def uneven(sample, arrays):
    arrays["received"][..., 0] *= 1 + sample
    arrays["received"][:, 1, 2] *= 1.5
    arrays["value_norm"][..., 0] = 3.0


@pytest.fixture(scope="module")
def runs(make_shared, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    curves = resources.files("sinklab.lab.checkpoints").joinpath("packaged", "curves")
    return {
        "study": [
            *costed(make_shared("plain", samples=8, change=uneven)),
            *costed(make_shared("sink", added=1, samples=8, text_share=0.2)),
        ],
        "training": [made(root / "bare"), made(root / "one", added=1)],
        "curve": [open_run(curves.joinpath(name)) for name in ("tiny", "tiny-causal", "tiny-sink")],
    }


def numbers_of(name, runs, **options):
    return figures[RENAMED.get(name, name)].drawn(runs, **options)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, frozen in FROZEN.items() for name in frozen]
)
def test_a_figure_shows_the_frozen_numbers(kind, name, runs):
    frozen, (name, _, run) = FROZEN[kind][name], name.partition(" of ")
    of = [one for one in runs[kind] if run in ("", one.info.model["name"])]
    options = {"layer": 1, "head": 2} if name == "sink_path_of_head" else {}
    shown = numbers_of(name, of, **options)
    if isinstance(frozen, list):
        drawn = shown["value"].to_numpy().reshape(len(frozen), -1)
        np.testing.assert_allclose(drawn, np.asarray(frozen, float), rtol=1e-5)
        return
    held = {words: [np.asarray(numbers, float) for numbers in frozen[words]] for words in frozen}
    if name == "score_histogram":
        for run, rows in shown.groupby("run"):
            np.testing.assert_allclose(rows["from"], held[f"{run}: {run}"][0][:-1], rtol=1e-5)
            np.testing.assert_allclose(rows["percent"], held[f"{run}: {run}"][1], rtol=1e-5)
        return
    if name == "training_loss":
        shown = shown[shown["line"] == "held-out text"].assign(line="")
    assert len(held) == shown.groupby(["run", "line"]).ngroups
    for (label, line), rows in shown.groupby(["run", "line"]):
        words, (x, *ends) = next(
            one for one in held.items() if one[0].startswith(label) and one[0].endswith(line)
        )
        if name == "heldout_loss":
            x = np.array([0, 1, 5])[x.astype(int)]
        if name == "sink_path_of_head":
            ends[0] = np.where(ends[0] < 0, -1, ends[0])
        np.testing.assert_allclose(rows.iloc[:, 2], x, rtol=1e-5, err_msg=words)
        for drawn, wanted in zip(rows.iloc[:, 3:6].to_numpy().T, ends, strict=True):
            np.testing.assert_allclose(drawn, np.broadcast_to(wanted, len(rows)), rtol=1e-5)
