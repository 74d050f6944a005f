"""What evicting caches keep: budgets, tiers, ties, draws that know no padding; phases, names and
refusals.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from refusals import refused
from sinklab.core.sampling import DecodingSettings
from sinklab.lab.caching import (
    EvictCache,
    EvictingCache,
    RandomCache,
    ReceivedCache,
    SinkCache,
    SinkRefreshCache,
)
from sinklab.lab.caching.policies import most_received
from sinklab.lab.caching.store import BlockStore, Window

# B batch, G key heads, S columns, C kept

BLOCK = slice(8, 12)
COLUMNS = 16


def candidates(padding=(0,)):
    real_BS = torch.arange(COLUMNS) >= torch.tensor(padding)[:, None]
    real_BS[:, BLOCK] = False
    return real_BS


def Budget(keep=0.5, sinks=0, **others):
    return EvictingCache(keep=keep, sinks=sinks, **others)


@dataclasses.dataclass
class Seen:
    """What an evaluation that chooses saw, with the measurements given."""

    received_BGS: torch.Tensor | None
    aligned_BS: torch.Tensor | None
    layer: int
    heads: int
    candidates_BS: torch.Tensor
    block: slice
    number: int


def kept_columns(budget, seen, candidates_BS, sinks_BGS, block, number):
    """(B, G, C) by the ranks of the budget, the protected sinks given in place of the budget's
    own.
    """
    policy = dataclasses.replace(budget, sinks=0)
    if sinks_BGS is not None:
        policy = dataclasses.replace(budget, sinks=1)
        object.__setattr__(policy, "protected", lambda _: sinks_BGS)
    window = Window(policy.work(block.start, block.stop, number, 0), block, candidates_BS)
    ranks_BGS = policy.ranks(Seen(*seen, candidates_BS, block, number))
    return BlockStore(None, window, policy, [{}], None)._best(ranks_BGS)


def kept(budget, received=None, aligned=None, sinks_BGS=None, padding=(0,), layer=0, number=0):
    """The kept columns of each row and head, in order."""
    heads = 2 if received is None else received.shape[1]
    seen = (received, aligned, layer, heads)
    counts = budget.counts(candidates(padding)).tolist()
    columns_BGC = kept_columns(budget, seen, candidates(padding), sinks_BGS, BLOCK, number)
    return [[head[:n].tolist() for head in row] for row, n in zip(columns_BGC, counts, strict=True)]


def test_the_nearest_come_alternately_and_the_left_one_first():
    assert kept(Budget(0.5)) == [[[7, 12, 6, 13, 5, 14]] * 2]


def test_what_receives_most_comes_first():
    received_BGS = torch.zeros(1, 2, COLUMNS)
    received_BGS[0, 0, [2, 9, 15]] = torch.tensor([1.0, 9.0, 2.0])
    received_BGS[0, 1, 4] = 1.0
    # column 9 is of the block; ties go to the left
    assert kept(Budget(0.25, score="received"), received_BGS) == [[[15, 2, 0], [4, 0, 1]]]
    assert most_received(received_BGS, candidates(), 2).nonzero()[:, 1:].tolist() == [
        [0, 2],
        [0, 15],
        [1, 0],
        [1, 4],
    ]


def test_sinks_come_before_neighbours_and_these_before_the_score():
    sinks_BGS = torch.zeros(1, 2, COLUMNS, dtype=torch.bool)
    sinks_BGS[0, 0, [1, 14]] = True
    received_BGS = torch.arange(COLUMNS, dtype=torch.float32).expand(1, 2, COLUMNS)
    budget = Budget(0.5, sinks=2, neighbours=1, score="received")
    assert kept(budget, received_BGS, sinks_BGS=sinks_BGS) == [
        [[14, 1, 12, 7, 15, 13], [12, 7, 15, 14, 13, 6]]
    ]


def test_dot_products_are_shared_with_neighbours_but_not_across_the_block():
    aligned_BS = torch.full((1, COLUMNS), -1.0)
    aligned_BS[0, [3, 9]] = torch.tensor([5.0, 50.0])
    assert kept(Budget(0.34, score="aligned"), aligned=aligned_BS) == [[[2, 3, 4, 0]] * 2]


@pytest.mark.parametrize("score", ["nearest", "random", "received", "aligned"])
def test_a_padded_row_keeps_what_it_keeps_alone(score):
    received_BGS, aligned_BS = torch.rand(2, 2, COLUMNS), torch.randn(2, COLUMNS)
    budget = Budget(0.4, score=score)
    row = kept(budget, received_BGS, aligned_BS, padding=(0, 3), layer=1, number=2)[1]
    alone = kept_columns(
        budget,
        (received_BGS[1:, :, 3:], aligned_BS[1:, 3:], 1, 2),
        candidates((3,))[:, 3:],
        None,
        slice(5, 9),
        2,
    )
    assert row == (alone[0] + 3).tolist()
    assert len(row[0]) == 3


def test_random_columns_differ_by_head_layer_and_block_and_are_even():
    draws = [
        kept(Budget(0.5, score="random"), layer=layer, number=number)
        for layer in (0, 1)
        for number in (0, 1)
    ]
    heads = [tuple(sorted(head)) for draw in draws for head in draw[0]]
    assert len(set(heads)) == 8
    counts = torch.zeros(COLUMNS)
    for number in range(300):
        for head in kept(Budget(0.5, score="random"), number=number)[0]:
            counts[head] += 1
    # 600 draws of 6 of 12 columns: 300 each, standard deviation 12
    assert ((counts[candidates()[0]] - 300).abs() < 60).all()
    assert int(counts[BLOCK].sum()) == 0


@pytest.mark.parametrize(
    "keep, others, count", [(0.29, 100, 29), (0.5, 7, 3), (1.0, 7, 7), (0.1, 9, 0)]
)
def test_budgets_are_rounded_down(keep, others, count):
    assert Budget(keep).counts(torch.ones(1, others, dtype=torch.bool)).tolist() == [count]


def test_equal_budgets_keep_equally_many_whatever_is_protected():
    sinks_BGS = torch.rand(1, 2, COLUMNS) < 0.5
    sinks_BGS[:, :, BLOCK] = False
    for score in ("nearest", "random"):
        bare, protected = (
            kept(Budget(0.5, score=score)),
            kept(Budget(0.5, 3, score=score), sinks_BGS=sinks_BGS),
        )
        assert [len(set(head)) for head in bare[0] + protected[0]] == [6] * 4


def test_phases():
    def phases(cache, count):
        return [
            (work.is_full, work.is_choice)
            for work in (cache.work(4, 6, 0, nth) for nth in range(count))
        ]

    full, choice, part = (True, False), (True, True), (False, False)
    assert phases(SinkCache(), 3) == [choice, part, part]
    assert phases(EvictCache(), 4) == [full, choice, part, part]
    assert phases(EvictCache(refresh_every=3), 5) == [full, choice, part, full, choice]
    assert phases(RandomCache(refresh_every=1), 2) == [choice, choice]
    assert phases(SinkRefreshCache(), 2) == [choice, part]
    assert [SinkCache().columns(4, 6, 9, nth) for nth in range(2)] == [None, slice(4, 6)]
    assert [EvictCache().columns(4, 6, 9, nth) for nth in range(3)] == [None, None, slice(4, 6)]
    assert [SinkRefreshCache(3).columns(4, 6, 9, nth) for nth in (0, 1, 3)] == [
        None,
        slice(4, 6),
        None,
    ]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"cache": "sink"}, SinkCache(sinks=4)),
        ({"cache": "sink", "cache_keep": 0.25, "cache_sinks": 0}, SinkCache(keep=0.25, sinks=0)),
        (
            {"cache": "evict", "cache_sinks": 2, "cache_protect": "first"},
            EvictCache(sinks=2, protect="first"),
        ),
        ({"cache": "received", "cache_neighbours": 8}, ReceivedCache(neighbours=8)),
        ({"cache": "random", "refresh_every": 3}, RandomCache(refresh_every=3)),
        ({"cache": "sink_refresh", "cache_sinks": 5}, SinkRefreshCache(sinks=5)),
    ],
    ids=str,
)
def test_settings_make_caches(settings, expected):
    assert DecodingSettings(**settings).values()["cache"] == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"cache_keep": 0.5},
            "cache_keep does not go with the cache 'none'.*belongs to evict, random, received, "
            "sink",
        ),
        (
            {"cache": "dual", "cache_sinks": 4},
            "cache_sinks does not go with the cache 'dual'.*random, received, sink, ",
        ),
        (
            {"cache": "sink_refresh", "cache_keep": 0.5},
            "cache_keep does not go with the cache 'sink_refresh'",
        ),
        ({"cache": "snk"}, r"unknown cache 'snk'.*did you mean 'sink'\?"),
        (
            {"cache": "sink", "cache_keep": 0.0},
            r"keep must be more than 0 and at most 1, but is 0\.0",
        ),
        (
            {"cache": "sink", "cache_keep": 1.5},
            r"keep must be more than 0 and at most 1, but is 1\.5",
        ),
        ({"cache": "evict", "cache_sinks": -1}, "sinks must be at least 0, but is -1"),
        ({"cache": "evict", "cache_neighbours": -2}, "neighbours must be at least 0, but is -2"),
        (
            {"cache": "sink", "cache_protect": "frst"},
            "protect must be one of now, first, earlier, but is 'frst'; did you mean 'f",
        ),
        (
            {"cache": "evict", "cache_protect": "first"},
            "with sinks=0 none are, got protect='first'; give a number of",
        ),
        (
            {"cache": "sink_refresh", "cache_sinks": 0},
            "sinks must be at least 1, but is 0; without any this is the dual cache",
        ),
        (
            {"cache": "sink", "refresh_every": 0},
            "refresh_every must be at least 1 or left out, but is 0",
        ),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings, message):
    refused(message, DecodingSettings(**settings).values)


def test_a_score_or_delay_that_is_none():
    refused(r"score must .*'recieved'", EvictingCache, score="recieved")
    refused("delay must be at least 0", EvictingCache, delay=-1)
