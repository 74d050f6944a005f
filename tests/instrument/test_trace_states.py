"""Where the queries of a step stand, in which state, and what each state gives to every key."""

# B batch, L layers, H heads, Q queries, S canvas positions
import itertools
from types import SimpleNamespace

import pytest
import torch
from probed import canvas_of, decoded
from torch.testing import assert_close

from refusals import refusing
from sinklab.core.instrument import position_states, trace
from sinklab.lab.caching import DualCache
from tiny_diffusion import tiny_model
from tiny_models import HandWritten, llama

NEW, BLOCK, CANVAS = 6, 3, 12
PLACES = [*itertools.product(range(NEW), range(2), range(4))]


def expected_columns(cache, nth, shift):
    block, within = divmod(nth, BLOCK)
    start = CANVAS - NEW + block * BLOCK
    if cache is None or within == 0:
        return list(range(CANVAS))
    return list(range(start - shift, start + BLOCK))


@pytest.mark.parametrize("cache, sinks, shift", [(None, 2, False), (DualCache(), 0, True)])
def test_by_state_against_the_maps(cache, sinks, shift):
    model = tiny_model(sinks, logit_shift=shift)
    canvas = canvas_of(model)
    names = ("received", "received_by_state")
    how = {"statistics": names, "maps": PLACES}
    steps, recording, _ = decoded(model, canvas, cache=cache, **how)
    assert recording.prefix == sinks
    for nth, step in enumerate(steps):
        columns = recording.columns[nth].tolist()
        own_BS = position_states(canvas, step.before_BS)
        assert torch.equal(recording.key_state[nth][:, sinks:], own_BS)
        assert columns == expected_columns(cache, nth, int(shift))
        # the slow twin: state by state, query by query
        by_state = torch.zeros(2, 3, 2, 4, sinks + CANVAS)
        for row in range(2):
            for query, own in enumerate(columns):
                if not canvas.attention_BS[row, own]:
                    assert recording.query_state[nth][row, query] == -1
                    continue
                target = own + 1 if shift and own + 1 < CANVAS else own
                state = own_BS[row, target]
                assert recording.query_state[nth][row, query] == state
                for layer, head in itertools.product(range(2), range(4)):
                    by_state[row, state, layer, head] += recording.map(nth, layer, head)[row, query]
        found = recording.values("received_by_state")[nth]
        assert_close(found, by_state, rtol=1e-5, atol=1e-5)
        assert_close(found.sum(1), recording.received[nth], rtol=1e-5, atol=1e-5)
    # the last full evaluation sees all three states
    assert all(
        bool((recording.values("received_by_state")[3][:, state] > 0).any()) for state in range(3)
    )


def test_a_shifted_predecessor_in_the_padding_is_no_query():
    # An empty prompt: the block begins right after the padding, whose last column runs for the
    # shift.
    model = tiny_model(0, logit_shift=True)
    canvas = canvas_of(model, [[5, 6, 7, 8, 9, 10], []])
    names = ("received", "received_by_state", "row_entropy")
    steps, recording, _ = decoded(model, canvas, cache=DualCache(), statistics=names)
    assert recording.columns[1].tolist() == [5, 6, 7, 8]
    assert recording.query_state[1][:, 0].tolist() == [
        int(canvas.mask_id != steps[1].before_BS[0, 6]),
        -1,
    ]
    assert_close(recording.received[1].sum(-1)[:, 0, 0], torch.tensor([4.0, 3.0]))
    assert recording.visible[1].tolist() == [[4] * 12, [0] * 6 + [3] * 6]
    assert recording.positions[1].tolist() == [12, 6]


def test_what_rows_have_stands_at_their_canvas_positions():
    model, cache = tiny_model(1), DualCache()
    canvas = canvas_of(model)
    names = ("row_entropy", "received_by_state")
    _, recording, _ = decoded(model, canvas, cache=cache, statistics=names)
    for name in ("row_entropy", "query_state"):
        for nth, compact in enumerate(getattr(recording, name)):
            expected = torch.full((*compact.shape[:-1], CANVAS), torch.nan)
            expected[..., expected_columns(cache, nth, 0)] = compact.float()
            found = torch.from_numpy(recording.array(name)[nth])
            assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert recording.array("positions").tolist() == [[12.0, 9.0]] * NEW


def test_ids_come_from_the_model_itself_without_a_denoiser():
    mask = 0
    open_BS = torch.tensor([[False, False, True, True, True]])
    canvas = SimpleNamespace(open_BS=open_BS, attention_BS=torch.ones_like(open_BS), mask_id=mask)
    ids = torch.tensor([[3, 4, 0, 9, 0]])
    for model, call in ((HandWritten(), {}), (llama(), {"use_cache": False})):
        with torch.no_grad(), trace(model, ("received_by_state",), canvas=canvas) as recording:
            model(ids, **call)
            if call:
                model(input_ids=ids, **call)
        assert all(state.tolist() == [[2, 2, 0, 1, 0]] for state in recording.query_state)
        queries = recording.values("received_by_state")[0].sum(-1)[0, :, 0, 0]
        assert_close(queries, torch.tensor([2.0, 1.0, 2.0]))
    states = trace(model, ("received_by_state",), canvas=canvas)
    with (
        refusing(r"model\.denoiser\(\)"),
        states,
    ):
        model(inputs_embeds=torch.randn(1, 5, 32))


OPEN = torch.ones(1, 5, dtype=torch.bool)
FITTING = SimpleNamespace(open_BS=OPEN, attention_BS=OPEN, mask_id=0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "canvas=canvas"),
        ({"canvas": FITTING}, r"\(1, 5\), .* \(1, 4\)"),
    ],
)
def test_a_canvas_that_does_not_fit_is_refused(options, message):
    model = HandWritten()
    refused = refusing(message)
    with refused, trace(model, ("received_by_state",), **options):
        model(torch.ones(1, 4, dtype=torch.long))
