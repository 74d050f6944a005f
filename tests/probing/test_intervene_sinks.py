"""What `MaskSinks` offers beyond the top k of the step before, each against dense float64 attention
edited by hand.
"""

# B batch, L layers, H heads, S keys
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from dense_twin import dense, received, top
from torch import Tensor

from sinklab.core.probing import MaskPositions, MaskSinks, SinkKeys, intervene, trace
from sinklab.core.registry import interventions, rules
from sinklab.core.sinks import Excess, Gu, Top, find_sinks
from tiny_models import HandWritten, Prefixed, llama

IDS = torch.randint(1, 30, (2, 12), generator=torch.Generator().manual_seed(1))
TEXTS = [(IDS + 5 * t) % 49 + 1 for t in range(4)]
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, :4] = 0
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def edited(model, edit, texts=TEXTS, **given):
    """Logits of each forward, and the log, of a run under the edit."""
    with torch.no_grad(), intervene(model, edit) as log:
        return [getattr(out := model(ids, **given), "logits", out) for ids in texts], log


def by_hand(model, choose, texts=TEXTS, **given):
    """The same run with dense attention: `choose(layer, received, gone before)` says what the next
    forward loses.
    """
    logits, gone, twins = [], {}, []
    real = given.get("attention_mask")
    for ids in texts:
        out, twin = dense(
            model, lambda ids=ids: model(ids, **given), lambda layer, _, gone=gone: gone.get(layer)
        )
        logits.append(getattr(out, "logits", out))
        gone = {
            layer: choose(layer, received(a, real), gone.get(layer))
            for layer, a in enumerate(twin.maps)
        }
        twins.append(twin)
    return logits, twins


@pytest.mark.parametrize("padded", [False, True])
def test_epsilon_takes_every_key_above_the_threshold(padded: bool) -> None:
    model, given = llama().double(), {"attention_mask": PADDED} if padded else {}
    seen_B = torch.tensor([8 if padded else 12, 12])

    def choose(layer: int, a_BHS: Tensor, _: object) -> Tensor:
        threshold_B = 1 + 0.5 * (seen_B - 1) / seen_B
        return (a_BHS > threshold_B[:, None, None]).unsqueeze(2)

    ours, log = edited(model, MaskSinks(epsilon=0.5), **given)
    theirs, twins = by_hand(model, choose, **given)
    real = PADDED.bool() if padded else torch.ones(2, 12, dtype=torch.bool)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[real], other[real], **EXACT)
    counts = log.removals[0].removed_BLH
    assert counts.min() < counts.max(), "heads lose different numbers of keys"
    columns = log.removals[0].columns_BLHM
    assert torch.equal((columns >= 0).sum(-1), counts.long())
    first = torch.stack([received(a, given.get("attention_mask")) for a in twins[0].maps], 1)
    taken = torch.zeros(*first.shape[:3], 13, dtype=torch.bool).scatter(3, columns % 13, True)[
        ..., :12
    ]
    visible = seen_B[:, None, None, None] * (PADDED if padded else torch.ones(2, 12))[:, None, None]
    assert torch.equal(taken, find_sinks(first, Excess(0.5), visible))


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_rows_of_unequal_length_lose_unequal_numbers_of_keys(epsilon: float) -> None:
    # The long row has more keys above the threshold than the short one has keys.
    model = llama().double()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :15] = 0
    ids = torch.randint(1, 30, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), intervene(model, MaskSinks(epsilon=epsilon)) as log:
        model(ids, attention_mask=mask)
        together = model(ids, attention_mask=mask).logits
    removed_BLH = log.removals[0].removed_BLH
    assert removed_BLH[1].max() >= 5 > removed_BLH[0].max() > 0
    # rotary angles are float32: the same text at other positions differs a little
    for row, part in ((0, ids[:1, 15:]), (1, ids[1:])):
        with torch.no_grad(), intervene(model, MaskSinks(epsilon=epsilon)) as alone:
            model(part)
            logits = model(part).logits
        assert torch.equal(alone.removals[0].removed_BLH[0], removed_BLH[row])
        torch.testing.assert_close(
            logits, together[row : row + 1, -part.shape[1] :], rtol=1e-3, atol=1e-5
        )


def test_nobody_above_epsilon_leaves_the_call_alone() -> None:
    model = HandWritten()
    plain = model(IDS)
    with intervene(model, MaskSinks(epsilon=11.5)) as log:
        model(IDS)
        assert torch.equal(plain, model(IDS))
    assert log.removals[0].removed_BLH.sum() == 0 and log.removals[0].columns_BLHM.shape[-1] == 0
    assert log.removals[0].realised_BLH.sum() == 0 and log.removals[
        0
    ].left_BLH.unique().tolist() == [12]


def test_epsilon_is_scaled_as_if_all_queries_ran() -> None:
    # One query runs against 12 remembered keys: an even share of its row is 1 / S.
    model = llama(causal=True).double()
    with (
        torch.no_grad(),
        intervene(model, MaskSinks(epsilon=1.0)) as log,
        trace(model) as recording,
    ):
        cache = model(IDS, use_cache=True).past_key_values
        for t in range(3):
            model(TEXTS[t][:, :1], past_key_values=cache)
    for removal, row in zip(log.removals[1:], recording.received[1:], strict=False):
        keys = row.shape[-1]
        above = row * keys > 1 + (keys - 1) / keys
        assert torch.equal(above.sum(-1), removal.removed_BLH.long())
        assert 0 < above.sum() < above.numel() / 2


@pytest.mark.parametrize("limit", [2, 5])
def test_carried_keys_stay_away_until_the_limit(limit: int) -> None:
    model = llama().double()

    def choose(layer: int, a_BHS: Tensor, gone: Tensor | None) -> Tensor:
        gone = torch.zeros(2, 4, 1, 12, dtype=torch.bool) if gone is None else gone
        room = min(2, limit - int(gone[0, 0].sum()))
        return gone | top(a_BHS.masked_fill(gone.squeeze(2), -1.0), room)

    ours, log = edited(model, MaskSinks(2, source="carried", limit=limit))
    theirs, _ = by_hand(model, choose)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    assert [int(removal.removed_BLH.max()) for removal in log.removals] == {
        2: [2, 2, 2],
        5: [2, 4, 5],
    }[limit]
    assert log.removals[1].overlap_BLH.unique().tolist() == [
        pytest.approx(1.0 if limit == 2 else 0.5)
    ]
    assert bool(log.removals[1].mass_BLH.isnan().all()) == (limit == 2), (
        "at the limit nothing new is chosen"
    )
    assert bool((log.removals[2].realised_BLH > 0).all())


def test_lowest_is_a_control_of_as_many_keys() -> None:
    model = llama()
    with (
        torch.no_grad(),
        intervene(model, MaskSinks(3, control="lowest")) as log,
        trace(model) as recording,
    ):
        for _ in range(3):
            model(IDS, attention_mask=PADDED)
    # a masked key receives nothing: it is among the lowest ever after
    assert log.removals[1].overlap_BLH.unique().tolist() == [1.0]
    a_BLHS = recording.received[0].masked_fill(PADDED[:, None, None] == 0, torch.inf)
    expected = a_BLHS.topk(3, -1, largest=False).indices
    assert torch.equal(log.removals[0].columns_BLHM.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("control", ["random", "recent", "lowest"])
def test_controls_match_the_number_above_epsilon(control: str) -> None:
    model = llama()
    sinks, others = (
        edited(model, MaskSinks(epsilon=0.8, control=name), TEXTS[:2])[1].removals[0]
        for name in ("sinks", control)
    )
    assert torch.equal(sinks.removed_BLH, others.removed_BLH)
    taken = (sinks.columns_BLHM.unsqueeze(-1) == others.columns_BLHM.unsqueeze(-2)) & (
        sinks.columns_BLHM >= 0
    )[..., None]
    assert not bool(taken.any())


def test_shared_by_layer_takes_what_the_mean_of_the_heads_ranks_first() -> None:
    model = llama().double()
    ours, log = edited(model, MaskSinks(2, shared="layer"))
    theirs, _ = by_hand(model, lambda layer, a_BHS, _: top(a_BHS.mean(1, keepdim=True), 2))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    removal = log.removals[0]
    columns = removal.columns_BLHM.sort(-1).values
    assert bool((columns == columns[:, :, :1]).all())
    assert len(removal.mass_BLH[0, 0].unique()) == 4, (
        "each head has its own share on the shared keys"
    )


@pytest.mark.parametrize("layers", [(1,), (-1,), ("layers.1",), "*.1.self_attn", 1])
def test_only_the_named_layers_and_heads_are_edited(layers: object) -> None:
    model = llama().double()
    heads = torch.tensor([False, True, False, True])[:, None, None]
    ours, log = edited(model, MaskSinks(2, layers=layers, heads=(1, 3)))
    theirs, twins = by_hand(
        model, lambda layer, a_BHS, _: top(a_BHS, 2) & heads if layer == 1 else None
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    removal = log.removals[0]
    assert removal.layers == ("model.layers.1.self_attn",) and removal.layer_numbers == (1,)
    assert removal.heads == (1, 3) and removal.columns_BLHM.shape == (2, 1, 2, 2)
    share = received(twins[0].maps[1]).topk(2, -1).values.sum(-1)[:, [1, 3]] / 12
    torch.testing.assert_close(removal.mass_BLH[:, 0], share.float())


def test_heads_may_be_named_in_any_order_and_twice() -> None:
    model = llama()
    every, named, some = (
        edited(model, MaskSinks(2, heads=heads)) for heads in (None, (3, 1, 0, 2), (-1, 3, 1))
    )
    assert all(torch.equal(one, other) for one, other in zip(every[0], named[0], strict=True))
    assert named[1].removals[0].heads == (0, 1, 2, 3) and some[1].removals[0].heads == (1, 3)
    assert torch.equal(
        some[1].removals[0].columns_BLHM, every[1].removals[0].columns_BLHM[:, :, [1, 3]]
    )


def test_spared_positions_count_from_the_canvas() -> None:
    model = Prefixed()
    spare = tuple(range(3, 12))
    _, log = edited(model, MaskSinks(4, spare=spare), [IDS, IDS])
    assert bool((log.removals[0].columns_BLHM < 2 + 3).all())
    _, log = edited(model, MaskSinks(3, spare=spare, spare_prefix=True), [IDS, IDS])
    assert log.removals[0].columns_BLHM.sort(-1).values.flatten(0, 2).unique(dim=0).tolist() == [
        [2, 3, 4]
    ]


@pytest.mark.parametrize(
    "options",
    [{"k": 2}, {"epsilon": 0.5}, {"k": 2, "control": "random"}, {"k": 1, "shared": "layer"}],
)
def test_without_a_cache_eviction_is_a_mask(options: dict) -> None:
    model = llama()
    masked, _ = edited(model, MaskSinks(**options), attention_mask=PADDED)
    evicted, log = edited(model, MaskSinks(removal="evict", **options), attention_mask=PADDED)
    assert all(torch.equal(one, other) for one, other in zip(masked, evicted, strict=True))
    assert torch.equal(masked[0], evicted[0]) and not torch.equal(
        masked[1], model(TEXTS[1], attention_mask=PADDED).logits
    )
    assert len(log.removals) == 3


class Remembering(torch.nn.Module):
    """One attention layer that keeps its keys and values and can give them back with some of them
    deleted.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, queries: slice) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            self.q[:, :, queries], self.k, self.v
        )


def test_evicted_keys_are_out_of_the_memory_until_everything_is_computed_anew() -> None:
    model, steps = (
        Remembering(),
        [slice(0, 9), slice(3, 6), slice(3, 6), slice(3, 6), slice(0, 9), slice(6, 9)],
    )
    with intervene(model, MaskSinks(1, removal="evict")) as log:
        outs = [model(step) for step in steps]
    memory: list[list[int]] = [[], []]
    fresh: list[int | None] = [None, None]
    for number, (step, out) in enumerate(zip(steps, outs, strict=True)):
        for head in range(2):
            kept = [] if step == slice(0, 9) else memory[head]
            memory[head] = kept + ([] if fresh[head] is None else [fresh[head]])
            stay = [key for key in range(9) if key not in memory[head]]
            # Keys and values are really deleted here, not masked.
            a = torch.softmax(model.q[0, head, step] @ model.k[0, head, stay].T / 2, -1)
            torch.testing.assert_close(out[0, head], a @ model.v[0, head, stay], **EXACT)
            fresh[head] = stay[int(a.sum(0).argmax())]
        if number:
            assert log.removals[number - 1].removed_BLH[0, 0].tolist() == [len(m) for m in memory]
    assert [int(removal.removed_BLH.max()) for removal in log.removals] == [1, 2, 3, 1, 2]
    assert log.removals[2].left_BLH.unique().tolist() == [6]


@pytest.mark.parametrize("limit", [None, 3])
def test_an_autoregressive_memory_shrinks_down_to_the_limit(limit: int | None) -> None:
    model = llama(causal=True)
    edit = MaskSinks(2, removal="evict", selector="last_row", limit=limit)
    with intervene(model, edit) as log, trace(model) as recording:
        model.generate(IDS, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(IDS))
    gone = [int(removal.removed_BLH.min()) for removal in log.removals]
    assert gone == ([2, 4, 6, 8] if limit is None else [2, 3, 3, 3])
    for removal, row in zip(log.removals, recording.received[1:], strict=True):
        assert bool(
            (
                row.gather(-1, removal.columns_BLHM.clamp(min=0)) * (removal.columns_BLHM >= 0) == 0
            ).all()
        )
        left = torch.full_like(removal.left_BLH, row.shape[-1]) - removal.removed_BLH
        torch.testing.assert_close(removal.left_BLH, left)


def test_a_memory_that_runs_empty_is_refused() -> None:
    model = llama(causal=True)
    with (
        pytest.raises(ValueError, match="set a limit"),
        intervene(model, MaskSinks(4, removal="evict")),
    ):
        model.generate(IDS, max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(IDS))


def test_guidance_carries_each_forward_apart() -> None:
    model = HandWritten()
    other = (IDS + 7) % 30
    edit = MaskSinks(1, source="carried", limit=2)
    with intervene(model, edit, forwards_per_step=2) as log:
        for ids in (IDS, other) * 3:
            model(ids)
    with intervene(model, edit) as alone:
        for ids in (other,) * 3:
            model(ids)
    assert torch.equal(log.removals[3].columns_BLHM, alone.removals[1].columns_BLHM)
    assert log.removals[3].removed_BLH.unique().tolist() == [2]


def test_numbers_may_be_numpys_and_become_python_ints() -> None:
    given, numbers = np.int64(2), np.arange(2)
    ours = MaskSinks(
        given, source="carried", limit=given, spare=numbers, layers=numbers, heads=numbers
    )
    assert ours == MaskSinks(
        2, source="carried", limit=2, spare=(0, 1), layers=(0, 1), heads=(0, 1)
    )
    assert interventions.parse(interventions.as_text(ours)) == ours
    assert MaskPositions(numbers, layers=numbers[1]) == MaskPositions((0, 1), layers=1)
    for wrong in (True, 2.0, np.float64(2)):
        with pytest.raises(ValueError, match="k counts the keys to remove"):
            MaskSinks(wrong)


def test_wrong_fields_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="got k=None and epsilon=None"):
        MaskSinks()
    with pytest.raises(ValueError, match=r"k=1 and epsilon=3\.0"):
        MaskSinks(1, 3.0)
    with pytest.raises(ValueError, match="epsilon must be at least 0"):
        MaskSinks(epsilon=-1)
    with pytest.raises(ValueError, match="limit=3 with when=None"):
        MaskSinks(1, limit=3)
    with pytest.raises(ValueError, match="limit counts the keys"):
        MaskSinks(1, source="carried", limit=0)
    with pytest.raises(ValueError, match="did you mean 'evict'"):
        MaskSinks(1, removal="evicted")
    with pytest.raises(ValueError, match="did you mean 'layer'"):
        MaskSinks(1, shared="layers")
    with pytest.raises(ValueError, match="layers are numbers in the"):
        MaskSinks(1, layers=(0.5,))
    with pytest.raises(ValueError, match="heads names at least one"):
        MaskSinks(1, heads=())
    with pytest.raises(ValueError, match="spare: numbers count from 0"):
        MaskSinks(1, spare=(-1,))


@pytest.mark.parametrize(
    "where", [{"layers": (2,)}, {"layers": (-3,)}, {"layers": ("mlp",)}, {"heads": (4,)}]
)
def test_layers_and_heads_that_are_not_there(where: dict) -> None:
    model = llama()
    message = "0 … 3" if "heads" in where else "'mlp'" if "mlp" in str(where) else "0 … 1"
    with pytest.raises(ValueError, match=message), intervene(model, MaskSinks(1, **where)):
        model(IDS)


def test_a_negative_layer_needs_somebody_who_counts() -> None:
    model = HandWritten()
    with (
        pytest.raises(ValueError, match=r"no config\.num_hidden_layers"),
        intervene(model, MaskSinks(1, layers=-1)),
    ):
        model(IDS)


RULES = [Excess(0.5), Excess(1.0, "zscore"), Gu(0.1), Top(2)]


@pytest.mark.parametrize("rule", RULES, ids=rules.as_text)
@pytest.mark.parametrize("k", [None, 1])
def test_any_rule_says_what_is_removed(rule: Any, k: int | None) -> None:
    log, recording = decoded(MaskSinks(k, rule=rule))
    for removal in log.removals:
        received, visible = (
            recording.received[removal.forward - 1],
            recording.visible[removal.forward - 1],
        )
        found = find_sinks(received, rule, visible[:, None, None])
        assert torch.equal(removal.removed_BLH, found.sum(-1).clamp(max=k or 99).float())
        gone = removal.columns_BLHM.masked_fill(removal.columns_BLHM < 0, 12)
        gone = torch.zeros(*received.shape[:-1], 13, dtype=torch.bool).scatter_(-1, gone, True)[
            ..., :12
        ]
        best = received.masked_fill(~found, -torch.inf).topk(1, -1).indices
        expected = found if k is None else found & torch.zeros_like(found).scatter_(-1, best, True)
        assert torch.equal(gone, expected)


def decoded(edit: MaskSinks) -> tuple[Any, Any]:
    model = HandWritten()
    with torch.no_grad(), intervene(model, edit) as log, trace(model) as recording:
        for step in range(3):
            model((IDS + 5 * step) % 30)
    return log, recording


def test_a_rule_of_ones_own_says_what_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_classes", dict(rules._all()))

    @rules.register("third")
    @dataclass(frozen=True)
    class Third:
        """The third key, whatever it receives."""

        def __call__(self, received: Any, queries: Any, exists: Any) -> Any:
            return (torch.arange(received.shape[-1]) == 2) & exists

    log, _ = decoded(interventions.parse("mask_sinks:rule=third"))
    assert log.removals and all(bool((removal.columns_BLHM == 2).all()) for removal in log.removals)


def test_epsilon_is_short_for_the_rule_of_excess() -> None:
    edit = MaskSinks(epsilon=1.0)
    assert edit == MaskSinks(rule=Excess(1.0))
    assert interventions.as_text(edit) == "mask_sinks:rule=excess:epsilon=1.0"
    assert interventions.parse("mask_sinks:epsilon=1.0,source=closed_loop") == replace(
        edit, when="previous"
    )
    assert interventions.as_text(MaskSinks(3, rule=Gu(0.2))) == "mask_sinks:k=3,rule=gu:weight=0.2"
    assert interventions.parse(
        "mask_sinks:k=3,rule=(excess:epsilon=2,scale=percent)"
    ).keys == SinkKeys(Excess(2.0, "percent"), 3)
    with pytest.raises(ValueError, match=r"rule=Gu\(.*\) .* epsilon=1\.0"):
        MaskSinks(epsilon=1.0, rule=Gu(0.2))
