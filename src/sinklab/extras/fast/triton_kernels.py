"""Triton kernels of one pass over the scores of a call: none writes them down.
`sinklab.extras.fast.score_pass` launches them.

Scores are in units of log 2 throughout: the hardware has exp2.
"""

# mypy: disable-error-code="no-untyped-def"
# Q queries, S keys, D head dim, G query groups; BQ, BS, BD sizes of a tile; strides are named after
# tensor and axis
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.7014118e38)
"""Half of the least float32: the chunk loop's bound of an additive mask, so that a row of least
values is even.
"""


@triton.jit
def _tile(at, row_stride, rows, n_rows, D: tl.constexpr, BD: tl.constexpr, CAST: tl.constexpr):
    """Some rows of a matrix (…, D), zeros beyond its end."""
    d = tl.arange(0, BD)
    is_there = (rows < n_rows)[:, None]
    if BD != D:
        is_there = is_there & (d < D)[None, :]
    x = tl.load(at + rows.to(tl.int64)[:, None] * row_stride + d[None, :], mask=is_there, other=0.0)
    return x.to(tl.float32) if CAST else x


@triton.jit
def _head(heads, index, SOME: tl.constexpr):
    """Number of the query head that stands at this place of those chosen."""
    return tl.load(heads + index) if SOME else index


@triton.jit
def _seen(
    x,
    mask,
    mask_m,
    mask_n,
    m,
    n,
    Q,
    S,
    MASK: tl.constexpr,
    BY_ROW: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Scores of queries m and keys n, which broadcast to them, under the mask: -inf if a key is
    blocked.
    """
    if MASK != "none":
        if BY_ROW:
            given = tl.load(
                mask + m.to(tl.int64) * mask_m + n * mask_n, mask=(m < Q) & (n < S), other=0
            )
        else:
            given = tl.load(mask + n * mask_n, mask=n < S, other=0)
        if MASK == "bool":
            x = tl.where(given != 0, x, -float("inf"))
        else:
            bias = given.to(tl.float32)
            x = tl.where(bias == -float("inf"), bias, x + tl.maximum(bias * LOG2E, LOWEST))
    return tl.where(m >= n, x, -float("inf")) if CAUSAL else x


@triton.jit
def _weighted(p, weights, m, Q):
    """Sums of the rows of p, (…, Q), with these weights of its columns."""
    return tl.sum(p * tl.load(weights + m, mask=m < Q, other=0.0)[None, :], 1)


@triton.jit
def _raised(x, low_Q, sum_Q, spread_Q, bound_Q):
    """The maximum of rows with these scores too, and their sums with that as their shift; a row
    that has seen no key yet stays at zero.
    """
    high_Q = tl.maximum(low_Q, tl.max(x, 1))
    rise_Q = tl.where(low_Q > -float("inf"), low_Q - high_Q, 0.0)
    shrink_Q = tl.exp2(rise_Q)
    spread_Q = (spread_Q + sum_Q * rise_Q) * shrink_Q
    return high_Q, sum_Q * shrink_Q, spread_Q, bound_Q * shrink_Q


@triton.jit
def columns(
    q,
    k,
    mask,
    shift,
    inverse,
    groups,
    heads,
    out,
    q_b,
    q_h,
    q_m,
    k_b,
    k_h,
    k_n,
    mask_b,
    mask_h,
    mask_m,
    mask_n,
    shift_b,
    shift_h,
    groups_b,
    groups_g,
    Q,
    S,
    scale,
    shared,
    D: tl.constexpr,
    G: tl.constexpr,
    MASK: tl.constexpr,
    BY_ROW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOME: tl.constexpr,
    CAST: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
):
    """out[b, h, g, j] = sum over i of groups[b, g, i] · inverse_i · exp2(x_ij − shift_i); a
    program: some keys.

    Keys stand in rows, so that a sum over queries stays within the threads that hold a row. A row
    of attention with an infinite shift adds nothing. G = 0: no weights; at most 4.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = _head(heads, h, SOME).to(tl.int64)
    n = block * BS + tl.arange(0, BS)
    k_SD = _tile(k + b * k_b + head // shared * k_h, k_n, n, S, D, BD, CAST)
    q += b * q_b + head * q_h
    shift += b * shift_b + h * shift_h
    inverse += b * shift_b + h * shift_h
    mask += b * mask_b + head * mask_h
    groups += b * groups_b
    sum_0 = tl.zeros([BS], tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    first = block * BS // BQ * BQ if CAUSAL else 0
    for start in range(first, Q, BQ):
        m = start + tl.arange(0, BQ)
        q_QD = _tile(q, q_m, m, Q, D, BD, CAST)
        x = tl.dot(k_SD, tl.trans(q_QD), input_precision="ieee") * scale
        x = _seen(x, mask, mask_m, mask_n, m[None, :], n[:, None], Q, S, MASK, BY_ROW, CAUSAL)
        p = tl.exp2(x - tl.load(shift + m, mask=m < Q, other=float("inf"))[None, :])
        p *= tl.load(inverse + m, mask=m < Q, other=0.0)[None, :]
        if G == 0:
            sum_0 += tl.sum(p, 1)
        else:
            sum_0 += _weighted(p, groups, m, Q)
        if G > 1:
            sum_1 += _weighted(p, groups + groups_g, m, Q)
        if G > 2:
            sum_2 += _weighted(p, groups + 2 * groups_g, m, Q)
        if G > 3:
            sum_3 += _weighted(p, groups + 3 * groups_g, m, Q)
    wide = S.to(tl.int64)
    out += (b * tl.num_programs(1) + h) * (G if G > 0 else 1) * wide + n
    tl.store(out, sum_0, mask=n < S)
    if G > 1:
        tl.store(out + wide, sum_1, mask=n < S)
    if G > 2:
        tl.store(out + 2 * wide, sum_2, mask=n < S)
    if G > 3:
        tl.store(out + 3 * wide, sum_3, mask=n < S)


@triton.jit
def rows(
    q,
    k,
    mask,
    norms,
    heads,
    shift,
    inverse,
    logsumexp,
    entropy,
    bound,
    q_b,
    q_h,
    q_m,
    k_b,
    k_h,
    k_n,
    mask_b,
    mask_h,
    mask_m,
    mask_n,
    norms_b,
    norms_h,
    shift_b,
    shift_h,
    Q,
    S,
    scale,
    shared,
    D: tl.constexpr,
    ENTROPY: tl.constexpr,
    BOUND: tl.constexpr,
    MASK: tl.constexpr,
    BY_ROW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOME: tl.constexpr,
    CAST: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
):
    """Shift of rows of attention (the maximum), 1 / the sum of exp2(x − shift), log-sum-exp,
    entropy and sum of p times norms; a program: some queries.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = _head(heads, h, SOME).to(tl.int64)
    m = block * BQ + tl.arange(0, BQ)
    q_QD = _tile(q + b * q_b + head * q_h, q_m, m, Q, D, BD, CAST)
    k += b * k_b + head // shared * k_h
    mask += b * mask_b + head * mask_h
    norms += b * norms_b + head // shared * norms_h
    low_Q = tl.full([BQ], -float("inf"), tl.float32)
    sum_Q = tl.zeros([BQ], tl.float32)
    spread_Q, bound_Q = sum_Q, sum_Q
    last = tl.minimum(S, (block + 1) * BQ) if CAUSAL else S
    for start in range(0, last, BS):
        n = start + tl.arange(0, BS)
        k_SD = _tile(k, k_n, n, S, D, BD, CAST)
        x = tl.dot(q_QD, tl.trans(k_SD), input_precision="ieee") * scale
        x = _seen(x, mask, mask_m, mask_n, m[:, None], n[None, :], Q, S, MASK, BY_ROW, CAUSAL)
        x = tl.where((n < S)[None, :], x, -float("inf"))
        low_Q, sum_Q, spread_Q, bound_Q = _raised(x, low_Q, sum_Q, spread_Q, bound_Q)
        x = x - tl.where(low_Q > -float("inf"), low_Q, 0.0)[:, None]
        w = tl.exp2(x)
        sum_Q += tl.sum(w, 1)
        if ENTROPY:
            # a weight of zero times -inf would not be zero
            spread_Q += tl.sum(w * tl.maximum(x, -1e6), 1)
        if BOUND:
            bound_Q += _weighted(w, norms, n, S)
    is_seen = sum_Q > 0
    inverse_Q = tl.where(is_seen, 1.0 / sum_Q, 0.0)
    log_Q = tl.log2(sum_Q)
    at, is_there = b * shift_b + h * shift_h + m, m < Q
    tl.store(shift + at, tl.where(is_seen, low_Q, float("inf")), mask=is_there)
    tl.store(inverse + at, inverse_Q, mask=is_there)
    tl.store(logsumexp + at, tl.where(is_seen, (low_Q + log_Q) * LN2, -float("inf")), mask=is_there)
    if ENTROPY:
        entropy_Q = tl.where(is_seen, (log_Q - spread_Q * inverse_Q) * LN2, 0.0)
        tl.store(entropy + at, tl.maximum(entropy_Q, 0.0), mask=is_there)
    if BOUND:
        tl.store(bound + at, bound_Q * inverse_Q, mask=is_there)
