import numpy as np
import torch
from numpy.testing import assert_allclose

from refusals import refused, refusing
from sinklab.core.sinks import Excess, find_sinks
from sinklab.lab.analysis import (
    jaccard,
    overlap_by_head,
    overlap_by_layer,
    overlap_by_step,
    sinks_per_layer,
)


def flags(*sets, keys=8):
    """(set, key) boolean rows."""
    rows = np.zeros((len(sets), keys), dtype=bool)
    for row, members in zip(rows, sets, strict=True):
        row[members] = True
    return rows


def test_jaccard_of_sets_and_counts():
    a, b = flags([0, 1, 2], [3], [], [4, 5]), flags([1, 2, 3], [3], [], [])
    assert_allclose(jaccard(a, b), [0.5, 1, np.nan, 0])
    assert_allclose(jaccard([3, 1, 0], [1, 1, 2]), 2 / 6)
    refused("sets of the same keys", jaccard, np.ones(3), np.ones(4))


def test_overlap_from_step_to_step():
    # (step, layer, head, key): one layer of two heads over three steps.
    sinks = np.stack([flags([1, 2], [0]), flags([2, 3], [0]), flags([5], [])])[:, None]
    assert_allclose(overlap_by_step(sinks)[:, 0], [[1 / 3, 1], [0, 0]])
    assert overlap_by_step(torch.from_numpy(sinks)).shape == (2, 1, 2)
    assert_allclose(overlap_by_step(np.stack([sinks, sinks]))[1], overlap_by_step(sinks))
    assert overlap_by_step(sinks[:1]).shape == (0, 1, 2)
    assert np.isnan(overlap_by_step(np.zeros((2, 1, 1, 4), dtype=bool))).all()
    refused(r"key\): got shape \(1, 2, 8\)", overlap_by_step, sinks[0])


def test_overlap_from_layer_to_layer():
    # Layer 0: both heads at key 1. Layer 1: one head at 1, one at 2. Layer 2: both at 6. Layer 3:
    # nothing.
    sinks = np.stack([flags([1], [1]), flags([1], [2]), flags([6], [6]), flags([], [])])
    matrix = overlap_by_layer(sinks)
    # Counts (2 at 1) against (1 at 1, 1 at 2): lesser 1, greater 3.
    expected = [[1, 1 / 3, 0, 0], [1 / 3, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, np.nan]]
    assert_allclose(matrix, expected)
    # A step in which layer 3 is as layer 2: their overlap is the mean of 0 and 1, that of layer 3
    # with itself 1.
    later = sinks.copy()
    later[3] = later[2]
    both = overlap_by_layer(np.stack([sinks, later]))
    assert_allclose(both[2], [0, 0, 1, 0.5])
    assert_allclose(both[3, 3], 1)
    refused("layer, head, key", overlap_by_layer, sinks[0])


def test_overlap_from_head_to_head():
    sinks = np.stack([flags([1], [1, 2], [5]), flags([], [], []), flags([3], [3], [3])])
    # Layer 0, pairs (0, 1), (0, 2), (1, 2): 1/2, 0, 0.
    assert_allclose(overlap_by_head(sinks), [1 / 6, np.nan, 1])
    alone = np.stack([flags([1], [], [])])
    # A pair of which one has a sink counts 0, the pair without any does not count.
    assert_allclose(overlap_by_head(alone), [0])
    random = np.random.default_rng(0).random((3, 2, 4, 6)) < 0.3
    slow = np.full((3, 2), np.nan)
    for step in range(3):
        for layer in range(2):
            heads = random[step, layer]
            pairs = [jaccard(heads[i], heads[j]) for i in range(4) for j in range(i)]
            slow[step, layer] = np.nanmean(pairs)
    assert_allclose(overlap_by_head(random), slow, rtol=1e-6)


def test_sinks_per_layer_by_hand():
    # Layer 0: three sinks of 8 in each of two heads, four keys in all. Layer 1: one sink of 32, the
    # same in both.
    received = np.full((2, 2, 2, 64), 0.3)
    for head, keys in enumerate(([1, 2, 3], [2, 3, 4])):
        received[:, 0, head, keys] = 8
    received[:, 1, :, 5] = 32
    found = sinks_per_layer(find_sinks(received, Excess(), received.shape[-1]), received)
    assert_allclose(found.number, [3, 1])
    assert_allclose(found.distinct, [4, 1])
    assert_allclose(found.score, [8, 32])
    twice = found + found
    assert twice.sinks.tolist() == [24, 8]
    halved = sinks_per_layer(
        find_sinks(received, Excess(), received.shape[-1]),
        received / 2,
        np.full(64, 32.0),
        np.full((1, 1, 1), 64),
    )
    assert_allclose(halved.score, [8, 32])


def test_sinks_per_layer_where_a_layer_is_missing_and_errors():
    received = np.full((1, 5, 1, 64), 0.3)
    received[0, 0] = np.nan
    found = sinks_per_layer(find_sinks(received, Excess(), received.shape[-1]), received)
    assert (
        np.isnan(found.number[0])
        and np.isnan(found.score[0])
        and found.heads.tolist() == [0, 1, 1, 1, 1]
    )
    one = sinks_per_layer(
        find_sinks(received[:, :1], Excess(), received.shape[-1]), received[:, :1]
    )
    refused(
        "One sink flag per score", sinks_per_layer, np.zeros((1, 5, 1, 8), dtype=bool), received
    )
    with refusing("got 5 and 1 layers"):
        found + one
