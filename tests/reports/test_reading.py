"""Runs of autoregressive models: all queries so far are read, and older ones are told apart."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from refusals import refused
from sinklab import open_run
from sinklab.core.sinks import DEFAULT, find_sinks
from sinklab.lab.analysis.facts import HEADS
from sinklab.lab.records.storage import file_hash
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


def test_the_page_reads_all_queries_so_far_and_says_so(folder):
    run = open_run(folder)
    assert run.info.model["reading"] == "all queries so far" and "all queries so far" in repr(run)
    shown = as_studies(run)[0]
    sample = shown.samples[0]
    received, visible = sample.array("received"), sample.array("visible")
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
    assert {"so_far_mobility", "last_row_mobility", "weight", "strong", "first"} <= {*motions}
    assert run.mobility().to_numpy() == pytest.approx(mobility_LH, nan_ok=True)
    reading, chosen = _notes(shown)
    assert "max(8, S/3)" in reading and "last query of the step before" in chosen
    assert 0 <= shown.chosen_keys.share <= 1


def changed(folder, path, change):
    """A copy of a run whose arrays are others, under the checksum that they have now."""
    run = open_run(folder).save(path)
    file = run.path / "attention-0000.safetensors"
    with safe_open(file, "numpy") as handle:
        metadata = handle.metadata()
        arrays = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    arrays |= {f"0/{key}": one for key, one in change(arrays["0/received"]).items()}
    save_file(arrays, file, metadata)
    about = json.loads((run.path / "run.json").read_text())
    about["files"][file.name] = file_hash(file)
    (run.path / "run.json").write_text(json.dumps(about))
    return run.path


IMPOSSIBLE = {
    "'received' .*6": lambda received: {"received": np.full_like(received, 6e4)},
    "'received' .*from -": lambda received: {"received": -3 * received},
}


@pytest.mark.parametrize("fragment", IMPOSSIBLE)
def test_numbers_that_no_attention_has_are_refused_by_file_and_array(fragment, folder, tmp_path):
    path = changed(folder, tmp_path / "run", IMPOSSIBLE[fragment])
    rule = "excess:epsilon=5"
    for read in (
        lambda: as_studies(open_run(path), rule=rule)[0].measured,
        lambda: open_run(path).with_rule(rule),
    ):
        refused(rf"attention.*{fragment}", read)
