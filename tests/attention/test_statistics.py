"""Every statistic against its dense float64 twin, over masks, grouped heads, chunk sizes and
extreme scores.
"""

# B batch, H query heads, K key heads, Q queries, S keys, D head dim
import pytest
import torch
from dense import ALL, KINDS, dense_attention, mask_of, received_attention, twins
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from refusals import refused
from sinklab.core.attention import (
    Scores,
    attention_map,
    attention_statistics,
    row_logsumexp,
    value_norms,
)

B, H, K, Q, S, D = 2, 4, 2, 37, 41, 8
CALL = (1, 2, 5, 4)


def factors():
    return torch.randn(B, H, Q, D), torch.randn(B, K, S, D), torch.randn(B, K, S, D)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize("chunk, heads", [(None, None), (5, (3, 0))])
def test_all_at_once_are_those_of_the_dense_map(kind, size, chunk, heads):
    mask, causal = mask_of(kind, B, H, Q, S)
    q, k, v = factors()
    q *= size
    state_BQ = torch.randint(-1, 3, (B, Q))
    groups = torch.stack([state_BQ == number for number in range(3)], 1)
    scores = Scores.of(q, k, mask, causal, heads=heads)
    found = attention_statistics(scores, ALL, v_BKSD=v, groups_BGQ=groups, chunk=chunk)
    chosen = list(heads or range(H))
    for name, twin in twins(q, k, v, mask, causal, groups).items():
        twin = twin[:, :, chosen] if name == "received" else twin[:, chosen]
        is_seen = twin > -1e30
        # Scores of magnitude `size` carry that much float32 rounding into the exponent.
        ours, theirs = found[name].double()[is_seen], twin[is_seen]
        assert_close(ours, theirs, rtol=1e-5 * size, atol=2e-6 * size)
        assert (found[name][~is_seen] < -1e30).all()
    whole = attention_map(q, k, mask=mask, is_causal=causal, heads=heads)
    dense = dense_attention(q, k, mask, causal)[:, chosen]
    assert_close(whole.double(), dense, rtol=1e-5 * size, atol=2e-6 * size)


@pytest.mark.parametrize("queries", [1, 300, 700])
def test_many_blocks_and_long_rows(queries):
    q, k = (torch.randn(3, heads, size, 4).double() for heads, size in ((6, queries), (3, 700)))
    twin = dense_attention(q, k, scale=0.7).sum(-2)
    received = received_attention(q, k, scale=0.7)
    assert received.dtype == torch.float64
    assert_close(received, twin, rtol=1e-12, atol=1e-12)


def test_scores_that_overflow_only_in_a_later_chunk():
    q, k = torch.randn(2, 1, 1, 40, 4, dtype=torch.float64)
    q[0, 0, 25] *= 1e4
    twin = dense_attention(q, k).sum(-2)
    assert_close(received_attention(q, k, chunk=8), twin, rtol=1e-9, atol=1e-12)


def test_statistics_carry_no_gradient_and_leave_inputs_alone():
    q, k = torch.randn(1, 1, 5, 4, requires_grad=True), torch.randn(1, 1, 5, 4, requires_grad=True)
    before = q.detach().clone()
    assert not received_attention(q, k).requires_grad
    assert not row_logsumexp(q, k).requires_grad
    assert torch.equal(before, q)


def test_no_tensor_with_two_sequence_axes_outlives_a_chunk():
    length, seen = 600, []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(x.numel() for x in tree_leaves(out) if torch.is_tensor(x))
            return out

    q, k = torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    with Sizes():
        received_attention(q, k, chunk=64)
    # The reused buffer holds several heads of one chunk at most, never one whole map.
    assert max(seen) < length * length


def test_value_norms_against_the_formula():
    v = torch.randn(B, K, S, D)
    expected = torch.stack([(v[:, m] ** 2).sum(-1).sqrt() for m in range(K)]).mean(0)
    assert_close(value_norms(v), expected)
    assert value_norms(v, per_head=True).shape == (B, K, S)
    half = v.bfloat16()
    assert torch.equal(value_norms(half), value_norms(half.float()))


@pytest.mark.parametrize(
    "q, k, options, message",
    [
        ((2, 3, 4), (1, 2, 3, 4), {}, "four axes"),
        (CALL, (1, 2, 0, 4), {}, "at least one position"),
        ((1, 3, 5, 4), CALL, {}, "multiple of key heads"),
        (CALL, (1, 2, 5, 8), {}, "share batch and head dim"),
        (CALL, CALL, {"mask": torch.ones(3, 7, dtype=torch.bool)}, "mask must broadcast"),
        (CALL, CALL, {"groups_BGQ": torch.ones(1, 5)}, "groups_BGQ must be of shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, options, message):
    refused(message, received_attention, torch.randn(q), torch.randn(k), **options)
