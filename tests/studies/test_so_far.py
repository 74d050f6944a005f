"""Rows of a cached decode, added up over steps that are not recorded."""

from dataclasses import replace

import pytest
from numpy.testing import assert_array_equal

from sinklab.lab.studies.trace.study import StudySettings
from small_runs import traced
from tiny_llama import tiny_llama


@pytest.mark.slow
def test_steps_that_are_not_recorded_are_added_up(tmp_path):
    edits = ("block_keys:keys=top:k=2,scores=last_row",)
    quick = StudySettings(prompts=("The old man sat",), new_tokens=8, statistics=(), edits=edits)
    whole, third = (
        traced(tiny_llama(), tmp_path / str(every), replace(quick, every=every)).arrays(
            "attention", sample=0
        )
        for every in (1, 3)
    )
    assert third["step_number"].tolist() == [0, 3, 6]
    keys = third["received"].shape[-1]
    for key in ("received", "visible"):
        assert_array_equal(third[key], whole[key][::3, ..., :keys])
    windows = third["window_received"]
    assert_array_equal(windows, whole["window_received"][: len(windows), ..., :keys])
