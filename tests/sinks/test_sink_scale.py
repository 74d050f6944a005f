import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from refusals import refused
from sinklab.core.sinks import Excess, Gu, even_share, find_sinks


@pytest.mark.ring("lab")
def test_one_query_of_a_cached_decoder_counts_as_if_all_had_run():
    from sinklab.lab.analysis.rules import Top

    # Twelve positions, one query: it gives 0.4 to the first key and 0.06 to each of ten others; the
    # last is not there.
    received = np.array([0.4] + [0.06] * 10 + [np.nan], dtype=np.float32)
    visible = np.array([1.0] * 11 + [0.0])
    scaled, seen = even_share(received, visible, np.array(11))
    assert_allclose(scaled[:11], 11 * received[:11], rtol=1e-6)
    assert np.isnan(scaled[11]) and seen.tolist() == [11.0] * 11 + [0.0]
    # 4.4 exceeds 1 + 3 * 10/11 = 3.73; the raw 0.4 could never exceed 1 + 0.
    assert np.flatnonzero(find_sinks(received, Excess(), visible, np.array(11))).tolist() == [0]
    assert not find_sinks(received, Excess(), visible).any()
    # The mean weight does not change, so neither do rules that only look at it or at the order.
    for rule in (Gu(), Top(1)):
        assert_array_equal(
            find_sinks(received, rule, visible, np.array(11)), find_sinks(received, rule, visible)
        )


def test_keys_seen_by_fewer_queries_keep_their_proportion():
    # A causal step of four queries of eight positions: the most that see one key is what ran.
    _, seen = even_share(np.ones(4), np.array([4.0, 3.0, 2.0, 1.0]), np.array(8))
    assert seen.tolist() == [8, 6, 4, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", [Excess(), Excess(2.0, "zscore"), Gu()])
def test_tensors_stay_tensors_and_agree_with_arrays(dtype, rule):
    draw = np.random.default_rng(0).dirichlet(np.full(10, 0.2), size=(3, 2, 4)).sum(-2)
    received = torch.from_numpy(draw).to(dtype)
    visible, positions = torch.full((3, 1, 10), 4), torch.full((3, 1), 10)
    scaled, seen = even_share(received, visible, positions)
    assert isinstance(scaled, torch.Tensor) and scaled.dtype in (torch.float32, torch.float64)
    assert_allclose(scaled.numpy(), received.double().numpy() * 2.5, rtol=1e-6)
    assert_allclose(seen.numpy(), 10)
    flags = find_sinks(received, rule, visible, positions)
    assert isinstance(flags, torch.Tensor) and flags.any()
    assert_array_equal(
        flags.numpy(),
        find_sinks(received.double().numpy(), rule, visible.numpy(), positions.numpy()),
    )


def test_errors_name_the_shapes():
    refused(
        r"shapes \(3,\) and \(3, 2, 2\)",
        even_share,
        np.ones((3, 2, 2, 8)),
        np.ones((3, 1, 1, 8)),
        np.ones(3),
    )
    refused(
        r"shapes \(5, 8\) and \(3, 8\)", even_share, np.ones((3, 8)), np.ones((5, 8)), np.ones(3)
    )
