"""Studies written under interventions."""

from dataclasses import replace

import pytest

from sinklab.lab.studies.trace.study import StudySettings
from small_runs import traced
from tiny_diffusion import tiny_loaded

QUICK = StudySettings(
    prompts=("The old man sat by", "The sea"),
    new_tokens=8,
    steps=4,
    block_length=None,
    statistics=(),
)


@pytest.mark.slow
@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
def test_a_run_under_edits_is_watched_and_says_what_was_removed(tmp_path, cfg_scale):
    settings = replace(
        QUICK,
        edits=("block_keys:keys=top:k=2", "block_keys:keys=positions:positions=1,when=now"),
        cfg_scale=cfg_scale,
    )
    run = traced(tiny_loaded(1), tmp_path / "run", settings)
    removals = run.table("removals")
    assert set(removals["edit"]) == {"block_keys", "block_keys#2"}
    assert removals["sample"].unique().tolist() == [0, 1]
    per_step = 2 if cfg_scale else 1
    for sample in (0, 1):
        watched = run.array("attention", "received", sample)
        mine = removals[(removals["sample"] == sample) & (removals["forward"] % per_step == 0)]
        assert (mine["forward"] // per_step).max() == 3
        for row in mine.itertuples():
            assert (
                watched[row.forward // per_step, row.layer, row.head][list(row.key_list)] == 0
            ).all()
        assert (watched[:, :, :, 2] == 0).all(), "position 1 stands behind one sink column"


@pytest.mark.slow
def test_random_columns_differ_between_samples_and_come_again(tmp_path):
    edits = ("block_keys:keys=random:like=top:k=2,seed=4",)
    quick = replace(QUICK, prompts=("The sea",) * 2, new_tokens=4, steps=2, edits=edits)
    one, other = (traced(tiny_loaded(), tmp_path / name, quick).table("removals") for name in "ab")
    keys = [one[one["sample"] == sample]["key_list"].map(sorted).tolist() for sample in (0, 1)]
    assert keys[0] != keys[1]
    assert one.equals(other)
