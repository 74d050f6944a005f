"""Interventions against a slow twin that masks by hand, their controls, their log, and that nothing
stays.
"""

# B batch, L layers, H heads, S keys
from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.core.probing import MaskSinks, intervene, trace
from tiny_models import STYLES, HandWritten, Prefixed, by_itself, checkpointed, llama

IDS = torch.randint(1, 30, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, :4] = 0


class Twin:
    """Dense attention in place of SDPA, with columns removed by hand; remembers what every layer's
    keys received.
    """

    def __init__(self) -> None:
        self.received: list[Tensor] = []
        self.gone: list[Tensor] | None = None
        self.removal = "mask"

    def __call__(
        self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        x = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        x = x if attn_mask is None else x.masked_fill(~attn_mask, -math.inf)
        gone = None if self.gone is None else self.gone[len(self.received)]
        if gone is not None and self.removal == "mask":
            x = x.masked_fill(gone.unsqueeze(2), -math.inf)
        if gone is not None and self.removal == "zero_value":
            v = v.masked_fill(gone.unsqueeze(-1), 0.0)
        a = torch.softmax(x, -1)
        real = (
            torch.ones(q.shape[0], q.shape[2])
            if attn_mask is None
            else attn_mask.any(2).any(1).float()
        )
        self.received.append((a * real[:, None, :, None]).sum(-2))
        return a @ v


def columns(received: Tensor, k: int) -> Tensor:
    return torch.zeros_like(received, dtype=torch.bool).scatter(
        -1, received.topk(k, -1).indices, True
    )


@pytest.mark.parametrize("removal", ["mask", "zero_value"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_closed_loop_against_the_slow_twin(removal: str, padded: bool, k: int, monkeypatch) -> None:
    model, given = llama(), {"attention_mask": PADDED} if padded else {}
    texts = [(IDS + 5 * t) % 49 + 1 for t in range(4)]
    real = PADDED.bool() if padded else torch.ones_like(PADDED, dtype=torch.bool)
    with (
        torch.no_grad(),
        intervene(model, MaskSinks(k, removal=removal)) as log,
        trace(model) as recording,
    ):
        edited = [model(ids, **given).logits for ids in texts]
    expected, gone, twin_received = [], None, []
    for ids in texts:
        twin = Twin()
        twin.gone, twin.removal = gone, removal
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(F, "scaled_dot_product_attention", twin)
            expected.append(model(ids, **given).logits)
        gone = [columns(received, k) for received in twin.received]
        twin_received.append(torch.stack(twin.received, 1))
    for ours, theirs, seen, dense in zip(
        edited, expected, recording.received, twin_received, strict=True
    ):
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen, dense, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(edited[1], model(texts[1], **given).logits, atol=1e-3)
    assert [removal_.forward for removal_ in log.removals] == [1, 2, 3]
    assert log.forwards == 4
    if padded:
        assert bool((log.removals[0].columns_BLHM[0] >= 4).all())
    share = recording.received[0].topk(k, -1).values.sum(-1) / real.sum(-1)[:, None, None]
    torch.testing.assert_close(log.removals[0].mass_BLH, share)


@pytest.mark.parametrize("trace_first", [True, False])
def test_trace_sees_the_edited_call_in_either_order(trace_first: bool) -> None:
    model = HandWritten()
    with ExitStack() as stack:
        if trace_first:
            recording = stack.enter_context(trace(model))
        log = stack.enter_context(intervene(model, MaskSinks(2)))
        if not trace_first:
            recording = stack.enter_context(trace(model))
        model(IDS)
        model(IDS)
    taken = log.removals[0].columns_BLHM
    assert bool((recording.received[1].gather(-1, taken) == 0).all())
    assert bool((recording.received[0].gather(-1, taken) > 0).all())
    assert recording.visible[1].tolist() == [[12] * 12] * 2


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("removal", ["mask", "zero_value"])
def test_every_kind_of_call_can_be_edited_and_is_restored(style: str, removal: str) -> None:
    model = HandWritten(style)
    plain = model(IDS)
    with intervene(model, MaskSinks(3, removal=removal)):
        first, second = model(IDS), model(IDS)
    assert torch.equal(plain, first)
    assert not torch.allclose(plain, second, atol=1e-3)
    assert bool(second.isfinite().all())
    assert torch.equal(plain, model(IDS))


def test_the_first_rows_of_a_causal_map_keep_their_only_key() -> None:
    model = HandWritten("causal", layers=1)
    plain = model(IDS)
    with intervene(model, MaskSinks(11)):
        model(IDS)
        edited = model(IDS)
    torch.testing.assert_close(edited[:, 0], plain[:, 0])


def test_restored_after_an_exception() -> None:
    model = llama()
    with torch.no_grad():
        plain = model(IDS).logits
        with pytest.raises(KeyError), intervene(model, MaskSinks(1)):
            model(IDS)
            model(IDS)
            raise KeyError
        assert torch.equal(plain, model(IDS).logits)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_forward_that_fails_does_not_count_as_the_previous_step() -> None:
    model = HandWritten()

    def fail(*_: object) -> None:
        raise RuntimeError

    with intervene(model, MaskSinks(1), allow_idle=True) as log:
        handle = model.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError):
            model(IDS)
        handle.remove()
        model(IDS)
    assert log.removals == [] and log.forwards == 1


@pytest.mark.parametrize("control", ["random", "recent"])
def test_controls_take_as_many_columns_outside_the_top_k(control: str) -> None:
    model = llama()
    options = {"attention_mask": PADDED.flip(-1)}
    with (
        torch.no_grad(),
        intervene(model, MaskSinks(3, control=control)) as log,
        trace(model) as recording,
    ):
        model(IDS, **options)
        model(IDS, **options)
    taken = log.removals[0].columns_BLHM
    sinks = recording.received[0].topk(3, -1).indices
    assert not bool((taken.unsqueeze(-1) == sinks.unsqueeze(-2)).any())
    assert bool((taken[0] < 8).all())
    assert bool((taken.sort(-1).values.diff() > 0).all())
    scores = recording.received[0].gather(-1, taken)
    assert bool((scores.diff() <= 0).all()), "by falling score"
    if control == "recent":
        free = [
            [c for c in reversed(range(8 if b == 0 else 12)) if c not in sinks[b, 0, 0]]
            for b in range(2)
        ]
        assert [set(taken[b, 0, 0].tolist()) for b in range(2)] == [set(row[:3]) for row in free]


def test_the_random_control_follows_its_seed() -> None:
    def run(seed: int) -> Tensor:
        model = HandWritten()
        model.load_state_dict(weights)
        with intervene(model, MaskSinks(2, control="random", seed=seed)) as log:
            model(IDS)
            model(IDS)
        return log.removals[0].columns_BLHM

    weights = HandWritten().state_dict()
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_clean_pass_selects_in_unedited_forwards_and_leaves_them_alone() -> None:
    model = HandWritten()
    plain = model(IDS)
    with intervene(model, MaskSinks(2, source="clean_pass")) as log, trace(model) as recording:
        for _ in range(2):
            with log.probing():
                assert torch.equal(plain, model(IDS))
            edited = model(IDS)
            recording.mark()
    assert not torch.allclose(plain, edited)
    assert log.forwards == 2 and len(log.removals) == 2 and recording.forwards_per_step == [1, 1]
    assert torch.equal(log.removals[0].columns_BLHM, log.removals[1].columns_BLHM)
    assert log.removals[1].overlap_BLH.unique().tolist() == [1.0]
    with (
        pytest.raises(ValueError, match="none was run"),
        intervene(model, MaskSinks(2, source="clean_pass")),
    ):
        model(IDS)


def test_overlap_and_summary() -> None:
    model = llama()
    with torch.no_grad(), intervene(model, MaskSinks(1)) as log:
        for _ in range(4):
            model(IDS)
    assert bool(log.removals[0].overlap_BLH.isnan().all())
    # What was masked receives nothing, so with one key the closed loop alternates (papers: removal
    # by turns).
    assert log.removals[1].overlap_BLH.max() == 0
    summary = log.summary()
    assert summary["forwards"] == 4 and summary["removals"] == 3
    assert 0 < summary["removed_mass"] < 1 and summary["overlap"] == 0


def test_reset_starts_a_new_sequence() -> None:
    model = HandWritten()
    plain = model(IDS[:1])
    with intervene(model, MaskSinks(1), allow_idle=True) as log:
        model(IDS)
        with pytest.raises(ValueError, match=r"call log\.reset\(\)"):
            model(IDS[:1])
        log.reset()
        assert torch.equal(plain, model(IDS[:1]))


def test_guidance_compares_each_forward_with_its_own_predecessor() -> None:
    model = HandWritten()
    other = (IDS + 7) % 30
    with intervene(model, MaskSinks(2), forwards_per_step=2) as log:
        for ids in (IDS, other, IDS, other):
            model(ids)
    with intervene(model, MaskSinks(2)) as alone:
        model(other)
        model(other)
    assert [removal.forward for removal in log.removals] == [2, 3]
    assert torch.equal(log.removals[1].columns_BLHM, alone.removals[0].columns_BLHM)


def test_spare_prefix_never_takes_the_models_own_sinks() -> None:
    model = Prefixed()
    taken = {}
    for spare in (False, True):
        with intervene(model, MaskSinks(11, spare_prefix=spare)) as log:
            model(IDS)
            model(IDS)
        assert log.prefix == 2
        taken[spare] = log.removals[0].columns_BLHM
    assert bool((taken[True] >= 2).all())
    assert bool((taken[False] < 2).any())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("removal", ["mask", "zero_value"])
def test_autoregressive_last_row_with_a_growing_cache(padded: bool, removal: str) -> None:
    model = llama(causal=True)
    mask = PADDED if padded else torch.ones_like(PADDED)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    edit = MaskSinks(2, selector="last_row", removal=removal)
    with intervene(model, edit) as log, trace(model) as recording:
        model.generate(IDS, **options)
    assert len(log.removals) == 3
    for removed, before, now in zip(
        log.removals[1:], recording.received[1:], recording.received[2:], strict=False
    ):
        assert torch.equal(removed.columns_BLHM, before.topk(2, -1).indices)
        if removal == "mask":
            assert bool((now.gather(-1, removed.columns_BLHM) == 0).all())
        # One query only: its row is the column sum.
        torch.testing.assert_close(removed.mass_BLH, before.topk(2, -1).values.sum(-1))


def test_last_row_is_the_last_real_query() -> None:
    model = llama(causal=True, kv_heads=4)
    right = PADDED.flip(-1)
    with torch.no_grad(), intervene(model, MaskSinks(2, selector="last_row")) as log:
        model(IDS, attention_mask=right)
        model(IDS, attention_mask=right)
        model.set_attn_implementation("eager")
    maps = torch.stack(model(IDS, attention_mask=right, output_attentions=True).attentions, 1)
    rows = torch.stack([maps[0, :, :, 7], maps[1, :, :, 11]])
    assert torch.equal(log.removals[0].columns_BLHM, rows.topk(2, -1).indices)


def test_checkpointed_gradients_are_those_of_the_edited_model() -> None:
    grads = []
    for checkpointing in (False, True):
        model = checkpointed(llama()) if checkpointing else llama().train()
        with intervene(model, MaskSinks(2)):
            model(IDS)
            model(IDS).logits.square().sum().backward()
        grads.append(model.model.layers[0].self_attn.v_proj.weight.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_no_edit_changes_nothing() -> None:
    model = HandWritten()
    with intervene(model):
        assert torch.equal(model(IDS), model(IDS))


def test_wrong_use_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        MaskSinks(0)
    with pytest.raises(ValueError, match="did you mean 'closed_loop'"):
        MaskSinks(1, source="closed-loop")
    with pytest.raises(ValueError, match="pass instances"), intervene(HandWritten(), MaskSinks):
        pass
    with (
        pytest.raises(ValueError, match="at least 1, got 0"),
        intervene(HandWritten(), forwards_per_step=0),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"more than 12 keys .* has 12"),
        intervene(model := HandWritten(), MaskSinks(12)),
    ):
        model(IDS)
    with (
        pytest.raises(ValueError, match=r"^6 keys .* row 0 .* has 2 "),
        intervene(model := llama(), MaskSinks(6, control="random")),
    ):
        model(IDS, attention_mask=PADDED)
    eager = by_itself(llama(attention="eager"))
    with (
        pytest.raises(ValueError, match='attn_implementation="sdpa"'),
        intervene(eager, MaskSinks(1)),
    ):
        eager(IDS)


def test_the_only_key_there_is_cannot_be_taken() -> None:
    with (
        pytest.raises(ValueError, match="needs more than 1 keys"),
        intervene(model := HandWritten(), MaskSinks(1)),
    ):
        model(IDS[:, :1])
        model(IDS[:, :1])
