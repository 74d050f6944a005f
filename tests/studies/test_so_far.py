"""Rows of a cached decode, added up over steps that are not recorded."""

from dataclasses import replace

import pytest
from numpy.testing import assert_array_equal

from sinklab.lab.studies.trace.study import StudySettings
from small_runs import traced
from tiny_llama import tiny_llama


@pytest.mark.parametrize("edits", [(), ("block_keys:keys=top:k=2,scores=last_row",)])
def test_steps_that_are_not_recorded_are_added_up(tmp_path, edits):
    quick = StudySettings(prompts=("The old man sat",), new_tokens=8, statistics=(), edits=edits)
    runs = {}
    for name, change in (("all", {}), ("third", {"every": 3})):
        run = traced(tiny_llama(), tmp_path / name, replace(quick, **change))
        runs[name] = run.arrays("attention", sample=0)
    whole, third = runs["all"], runs["third"]
    assert third["step_number"].tolist() == [0, 3, 6]
    keys = third["received"].shape[-1]
    for key in ("received", "visible"):
        assert_array_equal(third[key], whole[key][::3, ..., :keys])
    windows = third["window_received"]
    assert_array_equal(windows, whole["window_received"][: len(windows), ..., :keys])
