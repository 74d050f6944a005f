"""Edits that name positions: fixed keys, truncated context, windows; against dense float64
attention edited by hand.
"""

# B batch, L layers, H heads, Q queries, S keys
import pytest
import torch
from dense_twin import at, dense, over_queries
from probed import EXACT, IDS, canvas_of, decoded, padding
from torch.testing import assert_close

from refusals import refused, refusing
from sinklab.core.attention import running
from sinklab.core.instrument import intervene, trace
from sinklab.lab.caching import DualCache
from sinklab.lab.measures import (
    LoneRows,
    MaskPositions,
    MaskSinks,
    WindowAttention,
)
from tiny_diffusion import tiny_model
from tiny_models import Attends, HandWritten, Prefixed, llama


def near(radius, queries, keys=12):
    return (queries[:, None] - torch.arange(keys)).abs() <= radius


@pytest.mark.parametrize(
    "removal, causal, padded",
    [
        ("mask", False, False),
        ("mask", True, False),
        ("zero_value", True, True),
    ],
)
def test_fixed_positions_against_the_slow_twin(removal, causal, padded):
    model, (given, real) = llama(causal=causal).double(), padding(padded)
    edit = MaskPositions((7, 2, 2), how=removal)
    assert edit.keys.positions == (2, 7)
    with torch.no_grad(), intervene(model, edit) as log:
        ours = model(IDS, **given).logits
    zeroed = (lambda layer, a: at(2, 7).expand(2, 4, 12)) if removal == "zero_value" else None
    hide = () if zeroed else (lambda layer, a: at(2, 7),)
    theirs, twin = dense(model, lambda: model(IDS, **given).logits, *hide, zeroed=zeroed)
    assert_close(ours[real], theirs[real], **EXACT)
    removal_ = log.removals[0]
    before = twin.maps if zeroed else [layer[0] for layer in twin.before]
    held = [over_queries(a[..., [2, 7]].sum(-1), real) for a in before]
    assert_close(removal_["removed"], torch.stack(held, 1))
    assert removal_["held"].isnan().all(), "nobody chose them"
    # left padding counts as columns, and as nothing that is blocked
    first = [7, -1] if padded else [2, 7]
    assert removal_.columns_BLHM[:, 0, 0].tolist() == [first, [2, 7]]
    assert removal_["keys"][:, 0, 0].tolist() == [2 - padded, 2]
    assert removal_["left"][1, 0, 0] == removal_["left"][0, 0, 0] + 3 * padded or causal


def test_positions_stand_behind_the_prefix_and_added_sinks_are_named_apart():
    model = Prefixed()
    edits = MaskPositions((0, 11), layers=1, heads=-1), MaskPositions((3,), added=0, layers=0)
    with intervene(model, *edits) as log, trace(model) as recording:
        model(IDS)
    received = recording.received[0]
    assert (received[:, 1, 1, [2, 13]] == 0).all()
    assert (received[:, 0, :, [0, 5]] == 0).all() and int((received == 0).sum()) == 4 + 8
    assert log.removals[0].heads == (1,) and log.removals[0].layer_numbers == (1,)
    assert log.removals[0].columns_BLHM.tolist() == [[[[2, 13]]]] * 2


def test_steps_say_when():
    model = HandWritten()
    for steps, expected in (((1, 2), [2, 3]), ((1, None), [2, 3, 4])):
        with intervene(model, MaskPositions(4, steps=steps), forwards_per_step=2) as log:
            for _ in range(5):
                model(IDS)
        assert [removal.forward for removal in log.removals] == expected


@pytest.mark.parametrize("causal, padded", [(False, False), (True, True)])
def test_window_against_the_slow_twin(causal, padded):
    model, (given, real) = llama(causal=causal).double(), padding(padded)
    with (
        torch.no_grad(),
        intervene(model, WindowAttention(2, keep=(6,), layers=0, heads=(0, 2))) as log,
    ):
        ours = model(IDS, **given).logits
    some = torch.tensor([True, False, True, False])[:, None, None]
    far = ~(near(2, torch.arange(12)) | at(6)) & some
    theirs, twin = dense(
        model, lambda: model(IDS, **given).logits, lambda layer, a: None if layer else far
    )
    assert_close(ours[real], theirs[real], **EXACT)
    removal = log.removals[0]
    lost, seen = (twin.before[0][0] * far).sum(-1), (twin.maps[0] > 0).sum(-1)
    assert_close(removal["removed"][:, 0], over_queries(lost[:, [0, 2]], real))
    assert_close(removal["left"][:, 0], over_queries(seen[:, [0, 2]], real))
    assert removal.columns_BLHM.shape == (2, 1, 2, 0) and removal["held"].isnan().all()


def test_a_canvas_that_does_not_fit_is_refused():
    model, (q, k) = Attends(), (torch.randn(1, 2, size, 4) for size in (3, 12))
    with refusing("got 3 queries and 12 keys"), intervene(model, WindowAttention(2)):
        model(k, k, k)
        with running(IDS[:1], slice(0, 5)):
            model(q, k, k)


def test_a_window_in_a_cached_decoding_sees_its_neighbours():
    model = tiny_model(1, logit_shift=True)
    canvas = canvas_of(model, [[5, 6, 7, 8, 9, 10]])
    _, recording, _ = decoded(model, canvas, WindowAttention(1), cache=DualCache())
    for row, columns in zip(recording.received, recording.columns, strict=True):
        first, last = int(columns.min()), int(columns.max())
        seen = [key for key in range(12) if bool((row[..., 1 + key] > 0).all())]
        assert seen == list(range(max(0, first - 1), min(12, last + 2)))
        assert (row[..., 0] > 0).all()


def test_edits_compose_each_on_the_call_the_other_left():
    model = HandWritten().double()
    far = ~near(3, torch.arange(12))
    with intervene(model, WindowAttention(3), MaskPositions((4, 5))) as log:
        ours = model(IDS)
    theirs, twin = dense(model, lambda: model(IDS), lambda layer, a: far, lambda layer, a: at(4, 5))
    assert_close(ours, theirs, **EXACT)
    window, fixed = log.removals
    for layer, (first, second) in enumerate(twin.before):
        assert_close(window["removed"][:, layer], ((first * far).sum(-1).mean(-1)).float())
        assert_close(fixed["removed"][:, layer], second[..., 4:6].sum(-1).mean(-1).float())
    seen = (twin.maps[0] > 0).sum(-1).double().mean(-1).float()
    assert_close(fixed["left"][:, 0], seen)


def test_a_query_that_would_lose_all_its_keys_keeps_them_and_it_is_not_counted():
    model = HandWritten("causal", layers=1).double()
    with intervene(model, MaskPositions((0, 1))) as log:
        ours = model(IDS)
    theirs, twin = dense(model, lambda: model(IDS), lambda layer, a: at(0, 1))
    assert_close(ours, theirs, **EXACT)
    lost = (twin.before[0][0] - twin.maps[0]).clamp(min=0)[..., 2:, :2].sum((-1, -2)) / 12
    assert_close(log.removals[0]["removed"][:, 0], lost.float())
    assert log.removals[0]["left"].unique().item() == pytest.approx(
        (1 + 2 + sum(range(1, 11))) / 12
    )


def test_edits_that_together_take_everything_are_refused():
    model, first, second = HandWritten(), MaskPositions(range(6)), MaskSinks(6)
    refused = refusing(r"12 keys of .*row 0, head 0")
    with refused, intervene(model, first), intervene(model, second):
        model(IDS)
        model(IDS)
    with refused, intervene(model, first, second):
        model(IDS)
        model(IDS)
    # Zeroed values are still seen: nothing is lost but what they say.
    with intervene(model, first, MaskPositions(range(6, 12), how="zero_value")):
        assert model(IDS).isfinite().all()


@pytest.mark.parametrize(
    "model, edit, message",
    [
        (
            tiny_model(),
            MaskPositions(range(2, 13), steps=(0, None)),
            "position 12, the canvas had 12",
        ),
        (HandWritten(), MaskPositions(12), "block_keys: .*position 12"),
        (Prefixed(), MaskPositions(added=2), "sink 2, the model has 2"),
        (tiny_model(), LoneRows(rows=(12,)), "0 to 11, got 12"),
    ],
)
def test_positions_that_are_never_there_are_refused(model, edit, message):
    refused = refusing(message)
    with refused, intervene(model, edit), running(IDS):
        model(IDS)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MaskPositions(()), "got none"),
        (lambda: MaskPositions(3, how="maks"), "'mask'"),
        (lambda: MaskPositions(3, steps=(4, 4)), r"got \(4, 4\)"),
        (lambda: WindowAttention(-1), "radius .* -1"),
        (lambda: LoneRows(rows=()), "rows"),
    ],
)
def test_wrong_positions_and_windows_are_refused_by_name(make, message):
    refused(message, make)
