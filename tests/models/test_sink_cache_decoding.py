"""Sessions under caches that evict or refresh: both roads equal the slow twin, rows of a batch
equal rows alone.
"""

import itertools

import pytest
import torch
from cached_twin import TwinSession
from evicted_twin import EvictingTwin
from test_cached_decoding import MASK, PROMPTS, VARIANTS, agree, build, canvas, wanted_at, written

from refusals import refused
from sinklab.core.attention import watching
from sinklab.core.probing import intervene, trace
from sinklab.lab.caching import (
    DualCache,
    EvictCache,
    PrefixCache,
    RandomCache,
    ReceivedCache,
    SinkCache,
    SinkRefreshCache,
)
from sinklab.lab.measures import MaskSinks

# B batch, S canvas, M wanted, G key heads

POLICIES = {
    "sinks and neighbours": SinkCache(keep=0.4, sinks=2),
    "neighbours": SinkCache(keep=0.4, sinks=0),
    "first sinks": SinkCache(keep=0.5, sinks=3, protect="first"),
    "Sparse-dLLM": EvictCache(keep=0.5),
    "Sparse-dLLM with earlier sinks": EvictCache(keep=0.3, sinks=2, protect="earlier"),
    "received": ReceivedCache(keep=0.3),
    "received beside two neighbours": ReceivedCache(keep=0.7, neighbours=2),
    "random": RandomCache(keep=0.4),
    "random with sinks": RandomCache(keep=0.4, sinks=2),
    "sinks before neighbours": RandomCache(keep=0.4, sinks=2, neighbours=2),
    "more sinks than the budget": RandomCache(keep=0.2, sinks=9),
    "nothing kept": SinkCache(keep=0.01, sinks=4),
    "refreshed": SinkCache(keep=0.4, sinks=2, refresh_every=2),
}


def script(ids_BS, policy):
    """(ids, wanted, work) of two blocks of six, tokens committed in between, at different places in
    different rows.
    """
    calls, first = [], int((ids_BS[0] == MASK).nonzero()[0])
    for number, start in enumerate((first, first + 6)):
        for nth in range(3):
            wanted_BS = wanted_at(ids_BS, start, start + 6)
            calls.append((ids_BS, wanted_BS, policy.work(start, start + 6, number, nth)))
            ids_BS = ids_BS.clone()
            for row in wanted_BS.any(1).nonzero()[:, 0].tolist():
                ids_BS[row, wanted_BS[row].nonzero()[row % 2 and -1, 0]] = torch.randint(
                    0, MASK, ()
                )
    return calls


MOVED = ["first sinks", "Sparse-dLLM with earlier sinks", "random"]
CASES = [("two sinks at the end", name, 3) for name in POLICIES]
CASES += [(variant, name, 3) for variant in ("shifted", "gate and sink, qwen3") for name in MOVED]
CASES += [("shifted", "received", 1), ("llama", "Sparse-dLLM", 1), ("one layer", "received", 3)]
CASES += [(variant, "neighbours", 3) for variant in ("one key head", "heads of their own", "qwen2")]


@pytest.mark.parametrize("variant, policy, batch", CASES)
def test_both_roads_equal_the_slow_twin(variant, policy, batch):
    model, policy = build(**VARIANTS[variant]), POLICIES[policy]
    ids_BS, attention_BS = canvas(batch)
    calls = script(ids_BS, policy)
    twin = EvictingTwin(model, policy, attention_BS)
    quick, plain = (model.denoiser(attention_BS).begin(policy) for _ in range(2))
    expected = [twin(*call) for call in calls]
    agree([quick(*call) for call in calls], expected, 1e-10)
    with watching(model):
        agree([plain(*call) for call in calls], expected, 1e-10)


def test_the_road_may_change_in_the_middle_of_a_block():
    model = build()
    ids_BS, attention_BS = canvas(3)
    policy = ReceivedCache(keep=0.4)
    calls = script(ids_BS, policy)
    session, expected = (model.denoiser(attention_BS).begin(policy) for _ in range(2))
    mixed = []
    for index, call in enumerate(calls):
        if index % 2:
            with watching(model):
                mixed.append(session(*call))
        else:
            mixed.append(session(*call))
    agree(mixed, [expected(*call) for call in calls], 1e-10)


def plain_received(model, ids_BS, run):
    """Attention that the window's queries give every column, summed over layers and heads, by an
    eager softmax.
    """
    total, own = [], torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        prefix = model.sink_prefix(ids_BS.shape[1])

    def spy(query, key, value, **options):
        every = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        share = (
            query @ every.transpose(2, 3) * (options.get("scale") or query.shape[-1] ** -0.5)
        ).softmax(-1)
        total.append(share[0, :, run].sum((0, 1))[model.config.sink_count :])
        return own(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        model(ids_BS, sink_prefix=prefix)
    return torch.stack(total).sum(0)


@pytest.mark.parametrize("road", ["lean", "plain"])
@pytest.mark.parametrize("variant", ["llama", "two sinks at the end", "shifted"])
def test_the_most_attended_columns_are_computed_with_the_block(variant, road):
    model = build(**VARIANTS[variant])
    ids_BS, _ = canvas()
    policy = SinkRefreshCache(sinks=3)
    calls = script(ids_BS, policy)
    twin, session = TwinSession(model), model.denoiser().begin(policy)
    for ids_BS, wanted_BS, work in calls:
        columns = None
        start = work.block.start - 1 if model.config.logit_shift else work.block.start
        run = list(range(start, work.block.stop))
        if work.is_full:
            received_S = plain_received(model, ids_BS, run)
            received_S[run] = -1
            most = received_S.topk(3).indices
        else:
            columns = torch.tensor(run + most.tolist())
        expected_MV = twin_of_columns(twin, ids_BS, wanted_BS, columns)
        if road == "plain":
            with watching(model):
                agree([session(ids_BS, wanted_BS, work)], [expected_MV], 1e-10)
        else:
            agree([session(ids_BS, wanted_BS, work)], [expected_MV], 1e-10)


@torch.no_grad()
def twin_of_columns(twin, ids_BS, wanted_BS, columns):
    """The twin's evaluation with exactly these columns fresh: those a shifted model needs are among
    them.
    """
    if columns is None:
        return twin(ids_BS, wanted_BS)
    twin.memory.fresh_S = torch.zeros(ids_BS.shape[1], dtype=torch.bool)
    twin.memory.fresh_S[columns] = True
    return twin.model(ids_BS, None, logits_to_keep=wanted_BS, sink_prefix=twin.memory).logits


CACHES = [
    SinkCache(keep=0.5, sinks=2),
    EvictCache(keep=0.5, sinks=1),
    RandomCache(keep=0.5),
    SinkRefreshCache(sinks=3),
]


@pytest.mark.parametrize(
    "cache", [SinkCache(keep=1.0), ReceivedCache(keep=1.0, sinks=3), RandomCache(keep=1.0)]
)
def test_what_keeps_everything_is_the_dual_cache(cache):
    model = build(**VARIANTS["sink"])
    assert torch.equal(
        written(model, PROMPTS, cache=cache)[0], written(model, PROMPTS, cache=DualCache())[0]
    )


def test_every_cache_gives_a_text_of_its_own():
    model, caches = build(), (None, PrefixCache(), DualCache(), *CACHES)
    results = [written(model, PROMPTS, cache=cache)[0] for cache in caches]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(results, 2))


def test_memory_holds_what_is_kept_and_no_more():
    model = build(sink_kind="token", sink_count=1)
    ids_BS, _ = canvas()
    policy = SinkCache(keep=0.5, sinks=2)
    session, columns = model.denoiser().begin(policy), model.denoiser().begin()
    work = [policy.work(8, 14, 0, nth) for nth in range(2)]
    session(ids_BS, wanted_at(ids_BS, 8, 14), work[0])
    column = 2 * 3 * 2 * 8 * 8  # keys and values, layers, key heads, head dim, float64
    assert session.nbytes == (1 + 7 + 6) * column
    session(ids_BS, wanted_at(ids_BS, 8, 14), work[1])
    assert session.nbytes == (1 + 7 + 6) * column
    columns(ids_BS, wanted_at(ids_BS, 8, 14), None)
    assert columns.nbytes == (1 + 20) * column


def test_a_trace_sees_evicted_columns_receive_nothing():
    model = build(sink_kind="token", sink_count=1)
    ids_BS, _ = canvas()
    policy = SinkCache(keep=0.5, sinks=2)
    session = model.denoiser().begin(policy)
    with trace(model) as recording:
        for nth in range(2):
            session(ids_BS, wanted_at(ids_BS, 8, 14), policy.work(8, 14, 0, nth))
            recording.mark(nth)
    full, partial = recording.received
    assert int((full == 0).sum()) == 0
    # of 20 columns 14 are outside the block: 7 of them are kept in every layer and head
    assert set((partial == 0).sum(-1).flatten().tolist()) == {7}


def test_an_intervention_may_hide_what_a_cache_would_keep():
    model = build()
    ids_BS, _ = canvas()
    policy = SinkCache(keep=0.4, sinks=2)
    calls = script(ids_BS, policy)[:4]
    session, plain = (model.denoiser().begin(policy) for _ in range(2))
    expected = [session(*call) for call in calls]
    with intervene(model, MaskSinks(k=2)):
        hidden = [plain(*call) for call in calls]
    torch.testing.assert_close(hidden[0], expected[0])
    assert not torch.allclose(hidden[1], expected[1])
    assert torch.stack([part.isfinite().all() for part in hidden]).all()


@pytest.mark.parametrize(
    "policy, begun, work, message",
    [
        (SinkCache(keep=0.5), [], (8, 14, 0, 1), "nothing"),
        (EvictCache(keep=0.5), [(8, 14, 0, 0)], (8, 14, 0, 2), "chose"),
        (SinkCache(keep=0.5), [], (9, 14, 0, 0), r"slice\(9, 14"),
        (SinkCache(keep=0.5), [(8, 14, 0, 0)], (9, 14, 0, 1), r"slice\(9, 14"),
        (SinkCache(keep=0.5), [(8, 14, 0, 0)], (14, 20, 1, 1), r"slice\(14, 20, .*slice\(8, 14"),
    ],
)
def test_work_that_cannot_be_is_refused(policy, begun, work, message):
    ids_BS, _ = canvas()
    wanted_BS, session = wanted_at(ids_BS, 8, 14), build().denoiser().begin(policy)
    for one in begun:
        session(ids_BS, wanted_BS, policy.work(*one))
    refused(message, session, ids_BS, wanted_BS, policy.work(*work))


def test_attention_that_nobody_can_read_is_refused():
    model, policy = build(), SinkRefreshCache(sinks=2)
    ids_BS, attention_BS = canvas(3)
    wanted_BS = wanted_at(ids_BS, 8, 14)
    session = model.denoiser(attention_BS).begin(policy)
    with watching(model):
        session(ids_BS, wanted_BS, policy.work(8, 14, 0, 0))
        # rows that refresh columns of their own, under a trace
        refused("3 rows", session, ids_BS, wanted_BS, policy.work(8, 14, 0, 1))
    model.set_attn_implementation("eager")
    refused(
        "'eager'",
        model.denoiser(attention_BS).begin(policy),
        ids_BS,
        wanted_BS,
        policy.work(8, 14, 0, 0),
    )
