"""Budgets, draws, phases, names and refusals of evicting caches; which columns they keep is held to
a slow twin in tests/models.
"""

from __future__ import annotations

from types import SimpleNamespace

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

# B batch, G key heads, S columns, C kept

BLOCK = slice(8, 12)
COLUMNS = 16
CANDIDATES = torch.ones(1, COLUMNS, dtype=torch.bool)
CANDIDATES[:, BLOCK] = False


def test_random_columns_differ_by_head_layer_and_block_and_are_even():
    def drawn(layer, number):
        """The columns that each of two heads keeps."""
        seen = SimpleNamespace(
            layer=layer, number=number, heads=2, block=BLOCK, candidates_BS=CANDIDATES
        )
        rank_GS = RandomCache().ranks(seen)[0].masked_fill(~CANDIDATES, -COLUMNS)
        return rank_GS.topk(6).indices.tolist()

    heads = [tuple(sorted(head)) for n in range(4) for head in drawn(n // 2, n % 2)]
    assert len(set(heads)) == 8
    counts = torch.zeros(COLUMNS)
    for number in range(300):
        for head in drawn(0, number):
            counts[head] += 1
    # 600 draws of 6 of 12 columns: 300 each, standard deviation 12
    assert ((counts[CANDIDATES[0]] - 300).abs() < 60).all()


@pytest.mark.parametrize(
    "keep, others, count", [(0.29, 100, 29), (0.5, 7, 3), (1.0, 7, 7), (0.1, 9, 0)]
)
def test_budgets_are_rounded_down(keep, others, count):
    assert EvictingCache(keep=keep).counts(torch.ones(1, others, dtype=torch.bool)).tolist() == [
        count
    ]


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
        ({"cache": "sink_refresh", "cache_keep": 0.5}, "'sink_refresh'"),
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
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings, message):
    refused(message, DecodingSettings(**settings).values)


def test_a_score_or_delay_that_is_none():
    refused(r"score must .*'recieved'", EvictingCache, score="recieved")
    refused("delay must be at least 0", EvictingCache, delay=-1)
