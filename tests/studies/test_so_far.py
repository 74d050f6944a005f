"""Rows of a cached decode, added up: held to the columns of a full causal pass over the same
text.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from sinklab import intervene, trace
from sinklab.core.registry import interventions
from sinklab.lab.studies.trace.recording import SoFar
from sinklab.lab.studies.trace.study import StudySettings
from small_runs import traced
from tiny_llama import tiny_llama

NAMES = ("received", "received_by_window")


def whole(model, ids, edit):
    """Column sums, queries that see each key and the map, of one forward over one text."""
    maps = [(0, layer, head) for layer in range(2) for head in range(4)]
    edited = intervene(model, edit, measure=False) if edit else nullcontext()
    with torch.no_grad(), edited, trace(model, NAMES, maps=maps) as recording:
        model(torch.tensor([ids]), use_cache=False)
    map_LHQS = np.stack(
        [
            np.stack([recording.map(0, layer, head)[0].numpy() for head in range(4)])
            for layer in (0, 1)
        ]
    )
    return recording.received[0][0].numpy(), recording.visible[0][0].numpy(), map_LHQS


@pytest.mark.parametrize("edit", ["", "block_keys:keys=positions:positions=2,when=now"])
def test_rows_of_a_cached_decode_are_the_columns_of_a_full_pass(edit):
    model, made, ids = tiny_llama().model, None, [*range(20, 53)]
    if edit:
        made = interventions.parse(edit)
    sums, cache = SoFar(), None
    with torch.no_grad(), intervene(model, made, measure=False) if made else nullcontext():
        # the prompt, then token by token
        for new in (ids[:23], *([token] for token in ids[23:])):
            with trace(model, NAMES) as recording:
                cache = model(torch.tensor([new]), past_key_values=cache).past_key_values
            read = (recording.received, recording.visible, recording.received_by_window)
            sums.add(*(one[0][0].numpy() for one in read))
    received_LHK, visible_K, map_LHQS = whole(model, ids, made)
    assert sums.queries == len(ids)
    assert_allclose(sums.received, received_LHK, atol=1e-5)
    assert sums.visible.tolist() == visible_K.tolist() == [*range(len(ids), 0, -1)]
    windows = sums.windows(len(ids))
    assert len(windows) == len(ids) // 8
    for number, window_LHK in enumerate(windows):
        seen = 8 * number + 1
        expected = map_LHQS[:, :, 8 * number : 8 * number + 8].mean(2)[..., :seen]
        assert_allclose(window_LHK[..., :seen], expected, atol=1e-5)
        assert np.isnan(window_LHK[..., seen:]).all()


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
