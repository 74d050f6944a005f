"""Runs of autoregressive models: all queries so far are read, and older ones are told apart."""

from dataclasses import replace

import numpy as np
import pytest

from sinklab import open_run
from sinklab.core.sinks import DEFAULT, find_sinks
from sinklab.lab.analysis.facts import HEADS
from sinklab.lab.reports import as_studies
from sinklab.lab.reports.build import _notes
from sinklab.lab.studies.trace.study import StudySettings, study
from tiny_llama import tiny_llama

SETTINGS = StudySettings(
    prompts=("The old man sat by the sea, and the boy looked at the",), new_tokens=12
)
QUICK = replace(SETTINGS, statistics=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    study(tiny_llama(), path, replace(QUICK, edits=("block_keys:keys=top:k=2,scores=last_row",)))
    return path


@pytest.mark.slow
def test_the_page_reads_all_queries_so_far_and_says_so(folder):
    run = open_run(folder)
    assert run.info.model["reading"] == "all queries so far" and "all queries so far" in repr(run)
    shown = as_studies(run)[0]
    sample = shown.samples[0]
    received, visible = sample.stored("received"), sample.stored("visible")
    weight_TLHK = received / visible[:, None, None]
    length = received.shape[-1]
    # of the last step, the keys that at least max(8, S / 3) queries see
    defined = int(length - max(8, np.ceil(length / 3)) + 1)
    best_LHK = weight_TLHK[-1, ..., :defined]
    assert (sample.facts["main"][-1] == best_LHK.argmax(-1)).all()
    np.testing.assert_allclose(sample.derived()["share"][-1], best_LHK.max(-1), rtol=1e-3)
    assert sample.exists_TK[-1].sum() == defined
    assert not find_sinks(received, DEFAULT, visible[:, None, None])[-1, ..., defined:].any()
    motions = shown.measured.motions
    mobility_LH = sample.facts["heads"][HEADS.index("stable_mobility")]
    np.testing.assert_array_equal(motions["mobility"], mobility_LH.ravel())
    assert {"so_far_mobility", "weight", "strong", "first"} <= {*motions}
    assert run.mobility().to_numpy() == pytest.approx(mobility_LH, nan_ok=True)
    (reading,) = _notes([shown])
    assert "max(8, S/3)" in reading
