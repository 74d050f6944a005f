"""Every figure shows the numbers that are frozen in figure_numbers.json."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from test_report_training import made

from sinklab.lab.records import open_run
from sinklab.lab.registry import figures

FROZEN = json.loads(Path(__file__).with_name("figure_numbers.json").read_text("utf-8"))


def uneven(sample, arrays):
    arrays["share_by_state"][:] = np.array([0.5, 0.25, 0.125])[:, None, None]
    arrays["received"][..., 0] *= 1 + sample
    arrays["received"][:, 1, 2] *= 1.5
    arrays["value_norm"][..., 0] = 3.0


@pytest.fixture(scope="module")
def runs(make_shared, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    curves = resources.files("sinklab.lab.checkpoints").joinpath("packaged", "curves")
    return {
        "study": [
            make_shared("plain", samples=8, change=uneven),
            make_shared("sink", added=1, samples=8, text_share=0.2),
        ],
        "training": [made(root / "bare"), made(root / "one", added=1)],
        "curve": [open_run(curves.joinpath(name)) for name in ("tiny", "tiny-causal", "tiny-sink")],
    }


@pytest.mark.parametrize("kind", FROZEN)
def test_figures_show_the_frozen_numbers(kind, runs):
    import sinklab.lab.studies.curve.figures  # noqa: F401 (registers its figure)

    for name, frozen in FROZEN[kind].items():
        name, _, run = name.partition(" of ")
        of = [one for one in runs[kind] if run in ("", one.info.model["name"])]
        options = {"layer": 1, "head": 2} if name == "sink_path_of_head" else {}
        shown = figures[name].prepare(of, **options)
        if isinstance(frozen, list):
            np.testing.assert_allclose(shown.values_RC, np.asarray(frozen, float), rtol=1e-5)
            continue
        for line in (one for one in shown.lines if one.kind != "faint"):
            held = frozen.pop(f"{line.run}: {line.words or line.name}")
            for numbers, wanted in zip((line.x, line.y, line.low, line.high), held, strict=True):
                if wanted is not None:
                    np.testing.assert_allclose(numbers, np.asarray(wanted, float), rtol=1e-5)
        assert not frozen
