"""Studies written under interventions, and the truncation experiment."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sinklab.records import Run, open_run
from sinklab.studies.trace.recording import Selection
from sinklab.studies.trace.run import Truncation, agreement
from sinklab.studies.trace.study import StudySettings, study
from tiny_diffusion import tiny_loaded

QUICK = StudySettings(
    prompts=("The old man sat by", "The sea"),
    new_tokens=8,
    steps=4,
    block_length=None,
    statistics=(),
    mask_sinks=(),
    heldout="",
)


def received(run: Run, part: int = 0) -> np.ndarray:
    return run.array("attention", "received", part=part).astype(np.float32)


@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
def test_a_run_under_edits_is_watched_and_says_what_was_removed(tmp_path: Path, cfg_scale: float) -> None:
    settings = replace(QUICK, edits=("mask_sinks:k=2", "mask_positions:positions=1"), cfg_scale=cfg_scale, heldout=None)
    said: list[str] = []
    study(tiny_loaded(1), tmp_path / "run", settings, progress=said.append)
    assert said[0] == "no held-out loss: the run is written under edits"
    run = open_run(tmp_path / "run")
    assert run.info.settings["edits"] == ["mask_sinks:k=2", "mask_positions:positions=1"]
    assert run.parts("removals") == (0, 1)
    removals = run.table("removals")
    assert {"sample", "forward", "edit", "layer", "head", "row", "removed", "mass", "realised", "overlap", "keys"} <= {
        *removals.columns
    }
    assert set(removals["edit"]) == {"mask_sinks", "mask_positions"}
    assert removals["sample"].unique().tolist() == [0, 1]
    per_step = 2 if cfg_scale else 1
    for sample in (0, 1):
        watched = received(run, sample)
        mine = removals[(removals["sample"] == sample) & (removals["forward"] % per_step == 0)]
        assert (mine["forward"] // per_step).max() == 3
        for row in mine.itertuples():
            assert (watched[row.forward // per_step, row.layer, row.head][list(row.keys)] == 0).all()
    assert (received(run)[:, :, :, 2] == 0).all(), "position 1 stands behind one sink column"


def test_the_same_text_as_with_mask_sinks_beside_it(tmp_path: Path) -> None:
    study(tiny_loaded(), tmp_path / "beside", replace(QUICK, mask_sinks=(2,)))
    study(tiny_loaded(), tmp_path / "edited", replace(QUICK, edits=("mask_sinks:k=2",)))
    beside = open_run(tmp_path / "beside").table("generations")
    edited = open_run(tmp_path / "edited").table("generations")
    assert beside[beside["masked_sinks"] == 2]["completion"].tolist() == edited["completion"].tolist()
    assert edited["edits"].tolist() == ["mask_sinks:k=2"] * 2
    assert edited["masked_sinks"].tolist() == [0, 0]


def test_a_clean_pass_chooses_before_each_step(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    study(loaded, tmp_path / "run", replace(QUICK, edits=("mask_sinks:k=2,source=clean_pass",)))
    run = open_run(tmp_path / "run")
    removals = run.table("removals")
    assert sorted(removals["forward"].unique()) == [0, 1, 2, 3], "the first step has its clean pass too"
    study(loaded, tmp_path / "whole", QUICK)
    whole = received(open_run(tmp_path / "whole"))
    # the first step reads the same canvas in both runs: the two greatest keys are known
    for row in removals[(removals["forward"] == 0) & (removals["sample"] == 0)].itertuples():
        assert sorted(row.keys) == sorted(whole[0, row.layer, row.head].argsort()[-2:].tolist())
    assert run.table("steps")["step"].tolist() == [0, 1, 2, 3] * 2


def test_random_columns_differ_between_samples_and_come_again(tmp_path: Path) -> None:
    settings = replace(QUICK, prompts=("The sea",) * 2, edits=("mask_sinks:k=2,control=random,seed=4",))
    for name in "ab":
        study(tiny_loaded(), tmp_path / name, settings)
    one, other = (open_run(tmp_path / name).table("removals") for name in "ab")
    keys = [one[one["sample"] == sample]["keys"].map(sorted).tolist() for sample in (0, 1)]
    assert keys[0] != keys[1]
    assert one.equals(other)


def test_truncation_hides_the_middle_and_follows_the_heads(tmp_path: Path) -> None:
    loaded = tiny_loaded(1)
    study(loaded, tmp_path / "run", replace(QUICK, truncate=True, new_tokens=12, steps=6))
    run = open_run(tmp_path / "run")
    length = len(loaded.tokenizer(QUICK.prompts[0])["input_ids"]) + 12
    facts = run.table("truncated", part=0).iloc[0]
    assert (facts["start"], facts["stop"], facts["step"]) == (length * 3 // 8, length * 5 // 8, 3)
    whole, hidden = received(run), slice(1 + facts["start"], 1 + facts["stop"])
    table = run.table("truncation", part=0)
    assert table["step"].unique().tolist() == [3, 4, 5]
    assert len(table) == 3 * 2 * 4
    limit = 1 + 3 * (length - 1) / length
    for row in table.itertuples():
        # the step before the cut is that of the untouched run
        before = whole[2, row.layer, row.head]
        assert row.main_before == before.argmax()
        assert row.score_before == pytest.approx(before.max(), rel=1e-3)
        assert row.hidden_share_before == pytest.approx(before[hidden].sum() / before.sum(), rel=5e-3)
        assert row.lost == (hidden.start <= row.main_before < hidden.stop and row.score_before > limit)
        assert not hidden.start <= row.main_after < hidden.stop
        assert row.recovered == (row.score_after > limit)
    assert table["score_after"].between(1, length).all()
    generation = run.table("generations", part=0)
    assert len(generation) == 1
    assert facts["agreement"] == agreement(generation["token_ids"][0], facts["token_ids"])
    assert facts["agreement"] < 1, "the text changes"


def test_a_head_that_loses_its_sink_is_seen_to_lose_it() -> None:
    """One added sink column, eight positions of which a cache ran four as queries; positions 3 and 4 are hidden."""
    received_TLHK = np.full((3, 1, 2, 9), 0.1)
    received_TLHK[0, 0, 0, 5], received_TLHK[0, 0, 1, 0] = 3.2, 3.2
    received_TLHK[1:, ..., 4:6] = 0
    received_TLHK[1, 0, 0, 2], received_TLHK[2, 0, 0, 7] = 1.5, 2.5
    received_TLHK[1:, 0, 1, 0] = 3.0
    arrays = {
        "received": received_TLHK.astype(np.float16),
        "visible": np.full((3, 9), 4.0, np.float32),
        "positions": np.full(3, 8.0, np.float32),
        "step_number": np.array([2, 3, 4]),
    }
    plan = Truncation(start=3, stop=5, step=3, prefix=1)
    table = plan.table(arrays, Selection((6,), (1, 3), 8, 4), sample=9)
    assert set(table["sample"]) == {9}
    assert table["step"].tolist() == [3, 3, 4, 4]
    assert table["layer"].tolist() == [6] * 4
    assert table["head"].tolist() == [1, 3, 1, 3]
    assert table["main_before"].tolist() == [5, 0, 5, 0]
    assert table["score_before"] == pytest.approx([6.4] * 4, rel=1e-3)
    assert table["hidden_share_before"] == pytest.approx([3.3 / 4, 0.2 / 4, 3.3 / 4, 0.2 / 4], rel=1e-3)
    assert table["lost"].tolist() == [True, False, True, False]
    assert table["main_after"].tolist() == [2, 0, 7, 0]
    assert table["score_after"] == pytest.approx([3.0, 6.0, 5.0, 6.0], rel=1e-3)
    # above 1 + 3 · 7 / 8
    assert table["recovered"].tolist() == [False, True, True, True]


def test_agreement_counts_the_longer_text() -> None:
    assert agreement(np.array([1, 2, 3, 4]), np.array([1, 5, 3, 4])) == 0.75
    assert agreement(np.array([1, 2]), np.array([1, 2, 3, 4])) == 0.5
    assert agreement(np.array([]), np.array([])) == 1.0
