"""Every statistic against its dense float64 twin, over masks, grouped heads, chunk sizes and
extreme scores.
"""

# B batch, H query heads, K key heads, Q queries, S keys, D head dim
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.core.attention import (
    chunks,
    noop_bound,
    received_attention,
    row_entropy,
    row_logsumexp,
    value_norms,
)

B, H, K, Q, S, D = 2, 4, 2, 37, 41, 8


def dense_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """The whole map of scores in float64, masked: the slow twin."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    x = q.double() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        x = x.masked_fill(~torch.ones(x.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        x = x.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else x + mask.double()
    return x


def dense_attention(*args: object) -> Tensor:
    return torch.softmax(dense_scores(*args), -1).nan_to_num(0.0)


def make_mask(kind: str) -> Tensor | None:
    padded = torch.ones(B, 1, 1, S, dtype=torch.bool)
    padded[0, ..., :5] = False
    square = torch.rand(B, 1, Q, S) > 0.3
    square[..., 0] = True
    holes = square.clone()
    holes[0, 0, 3] = False
    additive = torch.zeros(B, H, Q, S).masked_fill(~square, -math.inf) + torch.randn(B, H, Q, S)
    return {
        "none": None,
        "causal": None,
        "padding": padded,
        "padding_expanded": padded.expand(B, 1, Q, S),
        "square": square,
        "empty_row": holes,
        "additive": additive,
        "finfo_min": torch.zeros(B, 1, Q, S).masked_fill(~holes, torch.finfo(torch.float32).min),
        "two_axes": square[0, 0],
        "causal_and_padding": padded,
    }[kind]


KINDS = (
    "none",
    "causal",
    "padding",
    "padding_expanded",
    "square",
    "empty_row",
    "additive",
    "finfo_min",
    "two_axes",
    "causal_and_padding",
)


@pytest.fixture(params=KINDS)
def masked(request: pytest.FixtureRequest) -> tuple[Tensor | None, bool]:
    return make_mask(request.param), request.param.startswith("causal")


@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize("chunk", [None, 5, 64])
def test_received_row_statistics_and_bound(masked, size: float, chunk: int | None) -> None:
    mask, causal = masked
    q, k, v = torch.randn(B, H, Q, D) * size, torch.randn(B, K, S, D), torch.randn(B, K, S, D)
    twin = dense_attention(q, k, mask, causal, None)
    options = {"mask": mask, "is_causal": causal, "chunk": chunk}
    # Scores of magnitude `size` carry that much float32 rounding into the exponent.
    tolerance = {"rtol": 1e-5 * size, "atol": 2e-6 * size}
    torch.testing.assert_close(
        received_attention(q, k, **options).double(), twin.sum(-2), **tolerance
    )
    torch.testing.assert_close(
        row_entropy(q, k, **options).double(), torch.special.entr(twin).sum(-1), **tolerance
    )
    norms = v.double().norm(dim=-1).repeat_interleave(H // K, 1).unsqueeze(-1)
    torch.testing.assert_close(
        noop_bound(q, k, v, **options).double(), (twin @ norms).squeeze(-1), **tolerance
    )
    lse = row_logsumexp(q, k, **options).double()
    expected = torch.logsumexp(dense_scores(q, k, mask, causal, None), -1)
    seen = expected > -1e30
    torch.testing.assert_close(lse[seen], expected[seen], **tolerance)
    assert bool((lse[~seen] < -1e30).all())


@pytest.mark.parametrize("queries", [1, 300, 700])
def test_many_blocks_and_long_rows(queries: int) -> None:
    q, k = (
        torch.randn(3, 6, queries, 4, dtype=torch.float64),
        torch.randn(3, 3, 700, 4, dtype=torch.float64),
    )
    twin = dense_attention(q, k, None, False, 0.7)
    received = received_attention(q, k, scale=0.7)
    assert received.dtype == torch.float64
    torch.testing.assert_close(received, twin.sum(-2), rtol=1e-12, atol=1e-12)


def test_a_product_of_ones_own_is_given_rows_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def product(q_CD: Tensor, k_SD: Tensor) -> Tensor:
        given.append(q_CD.is_contiguous() and k_SD.is_contiguous())
        return q_CD @ k_SD.T

    monkeypatch.setattr(chunks, "fast_path", lambda *call: product)
    # as a model lays them out, heads behind positions
    q, k = (torch.randn(1, 40, 2, 4).transpose(1, 2) for _ in range(2))
    twin = dense_attention(q, k, None, False, None).sum(-2)
    torch.testing.assert_close(received_attention(q, k).double(), twin, rtol=1e-5, atol=1e-6)
    assert given and all(given)


def test_scores_that_overflow_only_in_a_later_chunk() -> None:
    q, k = (
        torch.randn(1, 1, 40, 4, dtype=torch.float64),
        torch.randn(1, 1, 40, 4, dtype=torch.float64),
    )
    q[0, 0, 25] *= 1e4
    torch.testing.assert_close(
        received_attention(q, k, chunk=8),
        dense_attention(q, k, None, False, None).sum(-2),
        rtol=1e-9,
        atol=1e-12,
    )


def test_query_groups_split_the_sum() -> None:
    q, k, kind = torch.randn(B, H, Q, D), torch.randn(B, K, S, D), torch.randint(0, 3, (B, Q))
    groups = torch.stack([kind == 0, kind == 1, kind == 2], 1)
    split = received_attention(q, k, groups_BGQ=groups)
    twin = torch.einsum("bgq,bhqs->bghs", groups.double(), dense_attention(q, k, None, False, None))
    torch.testing.assert_close(split.double(), twin, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(split.sum(1), received_attention(q, k), rtol=1e-5, atol=2e-6)


def test_half_precision_inputs_are_summed_in_float32_even_under_autocast() -> None:
    q, k = torch.randn(1, 2, 200, 16).bfloat16(), torch.randn(1, 2, 200, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        received = received_attention(q, k)
    assert received.dtype == torch.float32
    torch.testing.assert_close(
        received.double(), dense_attention(q, k, None, False, None).sum(-2), rtol=1e-5, atol=1e-6
    )


def test_statistics_carry_no_gradient_and_leave_inputs_alone() -> None:
    q, k = torch.randn(1, 1, 5, 4, requires_grad=True), torch.randn(1, 1, 5, 4, requires_grad=True)
    before = q.detach().clone()
    assert not received_attention(q, k).requires_grad
    assert not row_logsumexp(q, k).requires_grad
    assert torch.equal(before, q)


def test_no_tensor_with_two_sequence_axes_outlives_a_chunk() -> None:
    length, seen = 600, []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(
                x.numel()
                for x in (out if isinstance(out, tuple | list) else [out])
                if torch.is_tensor(x)
            )
            return out

    q, k = torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    with Sizes():
        received_attention(q, k, chunk=64)
    # The reused buffer holds several heads of one chunk at most, never one whole map.
    assert max(seen) < length * length


def test_value_norms_against_the_formula() -> None:
    v = torch.randn(B, K, S, D)
    expected = torch.stack([(v[:, m] ** 2).sum(-1).sqrt() for m in range(K)]).mean(0)
    torch.testing.assert_close(value_norms(v), expected)
    assert value_norms(v, per_head=True).shape == (B, K, S)
    half = v.bfloat16()
    assert torch.equal(value_norms(half), value_norms(half.float()))


def test_bound_holds_for_the_real_output() -> None:
    q, k, v = torch.randn(B, H, Q, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    out = F.scaled_dot_product_attention(q, k, v)
    assert bool((out.norm(dim=-1) <= noop_bound(q, k, v) + 1e-5).all())


@pytest.mark.parametrize(
    ("q", "k", "options", "message"),
    [
        ((2, 3, 4), (1, 2, 3, 4), {}, "four axes"),
        ((1, 2, 5, 4), (1, 2, 0, 4), {}, "at least one position"),
        ((1, 2, 0, 4), (1, 2, 5, 4), {}, "at least one position"),
        ((1, 3, 5, 4), (1, 2, 5, 4), {}, "multiple of key heads"),
        ((1, 2, 5, 4), (1, 2, 5, 8), {}, "share batch and head dim"),
        (
            (1, 2, 5, 4),
            (1, 2, 5, 4),
            {"mask": torch.ones(3, 7, dtype=torch.bool)},
            "mask must broadcast",
        ),
        (
            (1, 2, 5, 4),
            (1, 2, 5, 4),
            {"groups_BGQ": torch.ones(1, 5)},
            "groups_BGQ must be of shape",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        received_attention(torch.randn(q), torch.randn(k), **options)
