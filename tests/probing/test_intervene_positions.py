"""Edits that name positions: fixed keys, truncated context, windows; against dense float64
attention edited by hand.
"""

# B batch, L layers, H heads, Q queries, S keys
from __future__ import annotations

import pytest
import torch
from dense_twin import dense
from torch import Tensor

from sinklab.core.attention import running
from sinklab.core.probing import (
    MaskPositions,
    MaskSinks,
    TruncateContext,
    WindowAttention,
    intervene,
    trace,
)
from sinklab.core.sampling import Canvas, denoise
from sinklab.lab.caching import DualCache, PrefixCache
from tiny_diffusion import tiny_model
from tiny_models import STYLES, HandWritten, Prefixed, llama

IDS = torch.randint(1, 30, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, :4] = 0
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def at(*columns: int, keys: int = 12) -> Tensor:
    gone = torch.zeros(keys, dtype=torch.bool)
    gone[list(columns)] = True
    return gone


def near(radius: int, queries: Tensor, keys: int = 12) -> Tensor:
    return (queries[:, None] - torch.arange(keys)).abs() <= radius


@pytest.mark.parametrize("removal", ["mask", "zero_value", "evict"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_fixed_positions_against_the_slow_twin(removal: str, causal: bool, padded: bool) -> None:
    model, given = llama(causal=causal).double(), {"attention_mask": PADDED} if padded else {}
    edit = MaskPositions((7, 5, 5), removal=removal)
    assert edit.keys.positions == (5, 7)
    with torch.no_grad(), intervene(model, edit) as log:
        ours = model(IDS, **given).logits
    zeroed = (lambda layer, a: at(5, 7).expand(2, 4, 12)) if removal == "zero_value" else None
    hide = () if zeroed else (lambda layer, a: at(5, 7),)
    theirs, twin = dense(model, lambda: model(IDS, **given).logits, *hide, zeroed=zeroed)
    real = PADDED.bool() if padded else torch.ones(2, 12, dtype=torch.bool)
    torch.testing.assert_close(ours[real], theirs[real], **EXACT)
    removal_ = log.removals[0]
    before = twin.maps if zeroed else [layer[0] for layer in twin.before]
    held = torch.stack(
        [(a[..., [5, 7]].sum(-1) * real[:, None]).sum(-1) / real.sum(-1)[:, None] for a in before],
        1,
    )
    torch.testing.assert_close(removal_.realised_BLH, held.float())
    assert bool(removal_.mass_BLH.isnan().all()), "nobody chose them"
    assert removal_.columns_BLHM.unique().tolist() == [5, 7]
    assert torch.equal(removal_.removed_BLH, torch.full((2, 2, 4), 2.0))


def test_left_padding_counts_as_columns_and_as_nothing_taken() -> None:
    model = llama()
    with intervene(model, MaskPositions((2, 6))) as log:
        model(IDS, attention_mask=PADDED)
    removal = log.removals[0]
    assert removal.removed_BLH[:, 0, 0].tolist() == [1, 2] and removal.left_BLH[
        :, 0, 0
    ].tolist() == [7, 10]
    assert removal.columns_BLHM[:, 0, 0].tolist() == [[6, -1], [2, 6]]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "edit", [MaskPositions((3, 4)), WindowAttention(2), MaskPositions(5, removal="zero_value")]
)
def test_every_kind_of_call_can_be_edited_by_position(style: str, edit: object) -> None:
    model = HandWritten(style)
    plain = model(IDS)
    with intervene(model, edit):
        changed = model(IDS)
    assert bool(changed.isfinite().all()) and not torch.allclose(plain, changed, atol=1e-3)
    assert torch.equal(plain, model(IDS))


def test_positions_stand_behind_the_prefix_and_edits_name_layers_and_heads() -> None:
    model = Prefixed()
    edit = MaskPositions((0, 11), layers=1, heads=-1)
    with intervene(model, edit) as log, trace(model) as recording:
        model(IDS)
    received = recording.received[0]
    assert bool((received[:, 1, 1, [2, 13]] == 0).all()) and int((received == 0).sum()) == 4
    assert log.removals[0].heads == (1,) and log.removals[0].layer_numbers == (1,)
    assert log.removals[0].columns_BLHM.tolist() == [[[[2, 13]]]] * 2


def test_steps_say_when() -> None:
    model = HandWritten()
    with intervene(model, MaskPositions(4, steps=(1, 3))) as log, trace(model) as recording:
        for _ in range(5):
            model(IDS)
    assert [removal.forward for removal in log.removals] == [1, 2]
    assert [bool((row[..., 4] == 0).all()) for row in recording.received] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert log.removals[1].overlap_BLH.unique().tolist() == [1.0]
    with intervene(model, MaskPositions(4, steps=(1, None)), forwards_per_step=2) as log:
        for _ in range(5):
            model(IDS)
    assert [removal.forward for removal in log.removals] == [2, 3, 4]


def test_truncation_hides_a_stretch_from_some_step_on() -> None:
    model = HandWritten().double()
    with intervene(model, TruncateContext(3, 6, step=2)) as log, trace(model) as recording:
        outs = [model(IDS) for _ in range(4)]
    hidden, twin = dense(model, lambda: model(IDS), lambda layer, a: at(3, 4, 5))
    for step, out in enumerate(outs):
        torch.testing.assert_close(out, hidden if step >= 2 else model(IDS), **EXACT)
    # The share it held just before is what the first removal takes.
    realised = log.removals[0].realised_BLH[:, 0]
    torch.testing.assert_close(realised, recording.received[1][:, 0, :, 3:6].sum(-1).float() / 12)
    torch.testing.assert_close(realised, twin.before[0][0][..., 3:6].sum((-1, -2)).float() / 12)


@pytest.mark.parametrize("cache", [None, PrefixCache(), DualCache()])
def test_truncation_in_the_middle_of_a_decoding(cache: object) -> None:
    model = tiny_model(2)
    canvas = Canvas.from_prompts(
        [[5, 6, 7, 8, 9, 10], [11, 12, 13]],
        new_tokens=6,
        mask_id=model.config.mask_token_id,
        pad_id=0,
    )
    with intervene(model, TruncateContext(1, 5, step=2)) as log, trace(model) as recording:
        for step in denoise(
            model.denoiser(canvas.attention_BS), canvas, cache=cache, block_length=3
        ):
            recording.mark(step)
    for number, row in enumerate(recording.received):
        assert bool((row[0, ..., 3:7] == 0).all()) == (number >= 2)
        assert bool((row[0, ..., :3] > 0).all())
    assert [removal.forward for removal in log.removals] == [2, 3, 4, 5] and log.prefix == 2
    assert log.removals[0].removed_BLH[:, 0, 0].tolist() == [4, 2]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_window_against_the_slow_twin(causal: bool, padded: bool) -> None:
    model, given = llama(causal=causal).double(), {"attention_mask": PADDED} if padded else {}
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
    real = PADDED.bool() if padded else torch.ones(2, 12, dtype=torch.bool)
    torch.testing.assert_close(ours[real], theirs[real], **EXACT)
    removal = log.removals[0]
    lost = (twin.before[0][0] * far).sum(-1)[:, [0, 2]]
    expected = (lost * real[:, None]).sum(-1) / real.sum(-1)[:, None]
    torch.testing.assert_close(removal.realised_BLH[:, 0], expected.float())
    seen = (twin.maps[0] > 0).sum(-1)[:, [0, 2]]
    torch.testing.assert_close(
        removal.left_BLH[:, 0], ((seen * real[:, None]).sum(-1) / real.sum(-1)[:, None]).float()
    )
    assert removal.columns_BLHM.shape == (2, 1, 2, 0) and bool(removal.mass_BLH.isnan().all())


@pytest.mark.parametrize("keep_prefix", [False, True])
def test_a_window_of_none_leaves_the_own_key_and_the_prefix(keep_prefix: bool) -> None:
    model = Prefixed()
    with (
        intervene(model, WindowAttention(0, keep_prefix=keep_prefix)) as log,
        trace(model) as recording,
    ):
        model(IDS)
    received = recording.received[0]
    if keep_prefix:
        assert bool((received[..., :2] > 0).all()) and bool((received[..., 2:] < 1).all())
    else:
        torch.testing.assert_close(
            received, torch.tensor([0.0] * 2 + [1.0] * 12).expand_as(received)
        )
    assert log.removals[0].left_BLH.unique().tolist() == [3.0 if keep_prefix else 1.0]
    assert log.removals[0].removed_BLH.unique().tolist() == [11.0 if keep_prefix else 13.0]


def test_a_window_moves_along_with_an_autoregressive_memory() -> None:
    model = llama(causal=True)
    with intervene(model, WindowAttention(3, keep=(0, 1))), trace(model) as recording:
        model.generate(IDS, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(IDS))
    for row in recording.received[1:]:
        keys = row.shape[-1]
        seen = [bool((row[..., key] > 0).all()) for key in range(keys)]
        assert seen == [key < 2 or key >= keys - 4 for key in range(keys)]


class Cached(torch.nn.Module):
    """Runs the announced columns against all keys, as a denoiser with a cache does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v = (torch.randn(1, 2, 14, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, columns: slice | Tensor | None, announced: object = "same") -> Tensor:
        ids = torch.zeros(1, 12, dtype=torch.long)
        q = self.q[:, :, 2:] if columns is None else self.q[:, :, 2:][:, :, columns]
        with running(ids, columns if announced == "same" else announced):
            return torch.nn.functional.scaled_dot_product_attention(q, self.k, self.v)


@pytest.mark.parametrize("columns", [None, slice(4, 9), torch.tensor([1, 2, 7, 8])])
def test_a_window_stands_where_the_denoiser_says_its_queries_stand(columns: object) -> None:
    model = Cached()
    places = torch.arange(12) if columns is None else torch.arange(12)[columns]
    with intervene(model, WindowAttention(2)) as log:
        out = model(columns)
    x = model.q[:, :, 2:][:, :, places] @ model.k.transpose(-1, -2) / 2
    sees = torch.cat([torch.ones(len(places), 2, dtype=torch.bool), near(2, places)], 1)
    torch.testing.assert_close(
        out, torch.softmax(x.masked_fill(~sees, -torch.inf), -1) @ model.v, **EXACT
    )
    assert log.prefix == 2


def test_a_canvas_that_does_not_fit_is_refused() -> None:
    model = Cached()
    with (
        pytest.raises(ValueError, match="got 3 queries and 12 keys"),
        intervene(model, WindowAttention(2)),
    ):
        model(None)
        model(slice(0, 3), slice(0, 5))


@pytest.mark.parametrize("cache", [PrefixCache(), DualCache()])
@pytest.mark.parametrize("shift", [False, True])
def test_a_window_in_a_cached_decoding_sees_its_neighbours(cache: object, shift: bool) -> None:
    model = tiny_model(1, logit_shift=shift)
    canvas = Canvas.from_prompts(
        [[5, 6, 7, 8, 9, 10]], new_tokens=6, mask_id=model.config.mask_token_id
    )
    with intervene(model, WindowAttention(1)), trace(model) as recording:
        for step in denoise(model.denoiser(), canvas, cache=cache, block_length=3):
            recording.mark(step)
    for row, columns in zip(recording.received, recording.columns, strict=True):
        first, last = int(columns.min()), int(columns.max())
        seen = [key for key in range(12) if bool((row[..., 1 + key] > 0).all())]
        assert seen == list(range(max(0, first - 1), min(12, last + 2)))
        assert bool((row[..., 0] > 0).all())


def test_edits_compose_each_on_the_call_the_other_left() -> None:
    model = HandWritten().double()
    far = ~near(3, torch.arange(12))
    with intervene(model, WindowAttention(3), MaskPositions((4, 5))) as log:
        ours = model(IDS)
    theirs, twin = dense(model, lambda: model(IDS), lambda layer, a: far, lambda layer, a: at(4, 5))
    torch.testing.assert_close(ours, theirs, **EXACT)
    window, fixed = log.removals
    for layer, (first, second) in enumerate(twin.before):
        torch.testing.assert_close(
            window.realised_BLH[:, layer], ((first * far).sum(-1).mean(-1)).float()
        )
        torch.testing.assert_close(
            fixed.realised_BLH[:, layer], second[..., 4:6].sum(-1).mean(-1).float()
        )
    seen = (twin.maps[0] > 0).sum(-1).double().mean(-1).float()
    torch.testing.assert_close(fixed.left_BLH[:, 0], seen)


def test_a_query_that_would_lose_all_its_keys_keeps_them_and_it_is_not_counted() -> None:
    model = HandWritten("causal", layers=1).double()
    with intervene(model, MaskPositions((0, 1))) as log:
        ours = model(IDS)
    theirs, twin = dense(model, lambda: model(IDS), lambda layer, a: at(0, 1))
    torch.testing.assert_close(ours, theirs, **EXACT)
    lost = (twin.before[0][0] - twin.maps[0]).clamp(min=0)[..., 2:, :2].sum((-1, -2)) / 12
    torch.testing.assert_close(log.removals[0].realised_BLH[:, 0], lost.float())
    assert log.removals[0].left_BLH.unique().item() == pytest.approx(
        (1 + 2 + sum(range(1, 11))) / 12
    )


@pytest.mark.parametrize("nested", [False, True])
def test_edits_that_together_take_everything_are_refused(nested: bool) -> None:
    model = HandWritten()
    first, second = MaskPositions(range(6)), MaskPositions(range(6, 12))
    message = "the edits together take all 12 keys of blocks.0, row 0, head 0"
    with pytest.raises(ValueError, match=message):
        if nested:
            with intervene(model, first), intervene(model, second):
                model(IDS)
        else:
            with intervene(model, first, second):
                model(IDS)
    # Zeroed values are still seen: nothing is lost but what they say.
    with intervene(model, first, MaskPositions(range(6, 12), removal="zero_value")):
        assert bool(model(IDS).isfinite().all())
    with pytest.raises(ValueError, match="take all 12 keys"), intervene(model, first, MaskSinks(6)):
        model(IDS)
        model(IDS)


def test_positions_that_are_not_there() -> None:
    model = tiny_model()
    canvas = Canvas.from_prompts([[5, 6]], new_tokens=2, mask_id=model.config.mask_token_id)
    message = "there is no position 4, the canvas had 4 .* from 0 to 3"
    with pytest.raises(ValueError, match=message), intervene(model, TruncateContext(2, 5, 1)):
        list(denoise(model.denoiser(), canvas))
    plain = HandWritten()
    with (
        pytest.raises(ValueError, match=r"mask_positions: .*position 12"),
        intervene(plain, MaskPositions(12)),
    ):
        plain(IDS)
    causal = llama(causal=True)
    with intervene(causal, MaskPositions(14)) as log:
        causal.generate(IDS, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(IDS))
    assert [int(removal.removed_BLH.max()) for removal in log.removals] == [0, 0, 0, 1, 1]


def test_wrong_positions_and_windows_are_refused_by_name() -> None:
    for wrong, message in (
        (lambda: MaskPositions(()), "got none: leave out the edit"),
        (lambda: MaskPositions((-1,)), "positions: numbers count from 0, got -1"),
        (lambda: MaskPositions((1.5,)), "positions: whole numbers are expected"),
        (lambda: MaskPositions("3"), r"positions: whole numbers are expected, got \('3',\)"),
        (lambda: MaskPositions(3, removal="maks"), "did you mean 'mask'"),
        (lambda: MaskPositions(3, steps=(4, 4)), r"got \(4, 4\): write \(4, 8\)"),
        (lambda: MaskPositions(3, steps=(None, 4)), r"got \(None, 4\)"),
        (lambda: TruncateContext(4, 4, 1), "stop is larger than start, but start=4 and stop=4"),
        (lambda: TruncateContext(4, 6, -1), "count from 0, got -1"),
        (lambda: WindowAttention(-1), "radius: numbers count from 0, got -1"),
        (lambda: WindowAttention(2, keep=(-2,)), "keep: numbers count from 0, got -2"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_added_sinks_are_named_apart() -> None:
    model = Prefixed()
    with intervene(model, MaskPositions((3,), added=0, layers=0)), trace(model) as recording:
        model(IDS)
    received_BHS = recording.received[0][:, 0]
    assert (
        bool((received_BHS[..., [0, 2 + 3]] == 0).all())
        and int((received_BHS == 0).sum(-1).amax()) == 2
    )
    with intervene(model, MaskPositions(added=(1,))) as log:
        model(IDS)
    assert log.removals[0].columns_BLHM.unique().tolist() == [1]
    with (
        pytest.raises(ValueError, match="no added sink 2, the model has"),
        intervene(model, MaskPositions(added=2)),
    ):
        model(IDS)
