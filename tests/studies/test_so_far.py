"""Rows of a cached decode, added up: held to the columns of a full causal pass over the same
text.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from refusals import refused
from sinklab import intervene, trace
from sinklab.core.registry import interventions
from sinklab.core.sampling.canvas import left_padded
from sinklab.lab.studies.trace.recording import SoFar
from sinklab.lab.studies.trace.study import StudySettings
from small_runs import traced
from tiny_llama import tiny_llama

TEXTS = [list(range(20, 43)), list(range(30, 36)), list(range(12, 24))]
NEW = 11
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


@pytest.mark.parametrize(
    ("texts", "edit"), [(TEXTS[:1], None), (TEXTS[:1], "mask_positions:positions=2"), (TEXTS, None)]
)
def test_rows_of_a_cached_decode_are_the_columns_of_a_full_pass(texts, edit):
    model, made = tiny_llama().model, interventions.parse(edit) if edit else None
    ids_BS, real_BS = left_padded(texts, 0)
    sums, cache = [SoFar() for _ in texts], None
    written = torch.randint(5, 60, (len(texts), NEW), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), intervene(model, made, measure=False) if made else nullcontext():
        for step in range(NEW):
            new_BS = ids_BS if step == 0 else written[:, step - 1 : step]
            real_BS = real_BS if step == 0 else torch.nn.functional.pad(real_BS, (0, 1), value=True)
            place_BS = (real_BS.long().cumsum(1) - 1).clamp(min=0)[:, -new_BS.shape[1] :]
            given = {"attention_mask": real_BS.long(), "position_ids": place_BS, "use_cache": True}
            with trace(model, NAMES) as recording:
                cache = model(new_BS, past_key_values=cache, **given).past_key_values
            for row, one in enumerate(sums):
                seen, windows = (
                    recording.visible[0][row].numpy(),
                    recording.received_by_window[0][row].numpy(),
                )
                one.add(recording.received[0][row].numpy(), seen, windows)
    for text, one, more in zip(texts, sums, written.tolist(), strict=True):
        ids = [*text, *more[: NEW - 1]]
        received_LHK, visible_K, map_LHQS = whole(model, ids, made)
        padding = ids_BS.shape[1] - len(text)
        assert one.queries == len(ids)
        assert not one.visible[:padding].any() and not one.received[..., :padding].any()
        assert_allclose(one.received[..., padding:], received_LHK, atol=1e-5)
        assert one.visible[padding:].tolist() == visible_K.tolist() == [*range(len(ids), 0, -1)]
        windows = one.windows(padding + len(ids), padding=padding)
        assert len(windows) == len(ids) // 8
        for number, window_LHK in enumerate(windows):
            seen = 8 * number + 1
            expected = map_LHQS[:, :, 8 * number : 8 * number + 8].mean(2)[..., :seen]
            assert_allclose(window_LHK[..., padding : padding + seen], expected, atol=1e-5)
            assert (
                np.isnan(window_LHK[..., padding + seen :]).all()
                and np.isnan(window_LHK[..., :padding]).all()
            )


def test_a_piece_that_begins_inside_of_a_window_is_refused():
    sums, piece = SoFar(), np.ones((1, 1, 3), np.float32)
    sums.add(piece, np.array([3.0, 2.0, 1.0]), piece[None])
    refused(
        "3 queries came a forward of 2",
        sums.add,
        np.ones((1, 1, 5), np.float32),
        np.array([2.0, 2.0, 2.0, 2.0, 1.0]),
        np.ones((1, 1, 1, 5), np.float32),
    )


@pytest.mark.parametrize("edits", [(), ("mask_sinks:k=2,selector=last_row",)])
def test_steps_that_are_not_recorded_are_added_up(tmp_path, edits):
    quick = StudySettings(prompts=("The old man sat",), new_tokens=8, statistics=(), edits=edits)
    runs = {}
    for name, change in (("all", {}), ("third", {"every": 3}), ("one", {"only_steps": (5,)})):
        run = traced(tiny_llama(), tmp_path / name, replace(quick, **change))
        runs[name] = run.arrays("attention", part=0)
    for name, steps in (("third", [0, 3, 6]), ("one", [5])):
        assert runs[name]["step_number"].tolist() == steps
        for key in ("received", "visible", "last_row_main"):
            keys = runs[name]["received"].shape[-1]
            wanted = runs["all"][key][steps]
            wanted = wanted[..., :keys] if key != "last_row_main" else wanted
            assert_array_equal(runs[name][key], wanted)
        windows = runs[name]["window_received"]
        assert_array_equal(
            windows, runs["all"]["window_received"][: len(windows), ..., : windows.shape[-1]]
        )
