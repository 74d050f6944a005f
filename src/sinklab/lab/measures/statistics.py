"""Further statistics: attention from some queries alone, norms, directions and drift of keys and
values, heads' outputs, and hidden states.
"""

# B batch, L layers so far, H query heads (those recorded), K key/value heads, G groups of queries,
# Q queries, S keys, D width: of a head, or of hidden states; N numbers of a row, or kinds of keys,
# R the greatest that are kept, X any axes
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, pad

from sinklab.core.attention.received import (
    attention_statistics,
    exactly,
    softmax_rows,
    value_norms,
)
from sinklab.core.attention.visibility import allowed
from sinklab.core.errors import Checked, limited
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.keys import dense_mask
from sinklab.core.instrument.statistics import KEYS, StatesView, Statistic, ValueNorm
from sinklab.core.registry import registered, rules, statistics
from sinklab.core.sinks import DEFAULT, MASKED, STATES, Rule
from sinklab.lab.scoring.hidden_states import real_weight


@statistics.register("received_from_masked")
@dataclass(frozen=True)
class ReceivedFromMasked(Statistic, Checked):
    """Attention every key receives from masked queries alone, as if all queries were masked.

    This attention decides the tokens.

    The mean weight that the masked queries which see the key give it, times the queries that see
    it: an even share is the same as in "received", and a rule may read it in its place
    (``find_sinks(…, rule, recording.visible)``). NaN if fewer than `least` masked queries see the
    key, edits included: too few to tell.
    """

    least: int = limited(8, at_least=1)
    """Masked queries that it takes."""

    axes = KEYS
    reads = ("received_by_state",)
    needs_canvas = True

    def measure(self, call: Call) -> Tensor:
        received_BHS = call.result("received_by_state")[:, MASKED]
        state_BQ: Any = call.query_state_BQ
        every_head = (-1, call.q_BHQD.shape[1], -1)
        masked_BHS, every_BHS = (
            call.of_heads(seen_after(call, some_BQ).to(received_BHS).expand(every_head))
            for some_BQ in (state_BQ == MASKED, call.visibility.counted_BQ)
        )
        told_BHS = (masked_BHS >= self.least) | (every_BHS == 0)
        mean_BHS = received_BHS / masked_BHS.clamp_min(1)
        return (mean_BHS * every_BHS).masked_fill(~told_BHS, torch.nan)


def seen_after(call: Call, some_BQ: Tensor) -> Tensor:
    """Number of these queries that see each key, edits included, (B, 1 or H, S)."""
    visibility = replace(call.visibility, mask=call.mask, is_causal=call.is_causal)
    return visibility.seen_by(some_BQ)


@statistics.register("given_by_state")
@dataclass(frozen=True)
class GivenByState(Statistic):
    """Shares of every query's attention row: on masked, committed and prompt keys, and on sinks,
    whatever their state. Added sinks have no state.
    """

    rule: Rule = registered(rules, DEFAULT)
    """Rule of sinks."""

    axes = ("batch", "layer", "head", "position", "number")
    columns = ("masked", "committed", "prompt", "sinks")
    needs_canvas = True

    def measure(self, call: Call) -> Tensor:
        state_BS = pad(call.state_BS, (call.prefix, 0), value=-1)
        sinks_BHS = call.sinks(self.rule)
        kinds = [(state_BS == state)[:, None].expand_as(sinks_BHS) for state in range(len(STATES))]
        kind_BHSN = torch.stack([*kinds, sinks_BHS], -1)
        scores = call.scores(call.heads)
        shares_BHQN = kind_BHSN.new_zeros((*scores.shape, kind_BHSN.shape[-1]), dtype=scores.dtype)
        with exactly(shares_BHQN.device):
            for rows in softmax_rows(scores):
                keys = rows.powers_BHCS.shape[-1]
                kind = kind_BHSN[rows.at[0], rows.at[1], :keys].to(scores.dtype)
                shares_BHQN[rows.at] = (rows.powers_BHCS @ kind) * rows.inverse_BHC.unsqueeze(-1)
        return shares_BHQN


WINDOW = 8
"""Queries of a window of "received_by_window"."""


@statistics.register("received_by_window")
class ReceivedByWindow(Statistic):
    """The column sums of successive windows of `WINDOW` queries of a forward.

    The windows are disjoint parts of an autoregressive text.

    Padding does not count: the first window begins with the first real query.
    """

    axes = ("batch", "window", "layer", "head", "key")
    reads = ("received",)

    def measure(self, call: Call) -> Tensor:
        queries = call.q_BHQD.shape[2]
        real_BQ = call.visibility.counted_BQ
        if queries <= WINDOW:
            return call.received_BHS.unsqueeze(1)
        number_BQ = torch.div(real_BQ.long().cumsum(1) - 1, WINDOW, rounding_mode="floor")
        windows = range(-(-queries // WINDOW))
        groups_BGQ = torch.stack([(number_BQ == number) & real_BQ for number in windows], 1)
        scores = call.scores(call.heads)
        return attention_statistics(scores, ("received",), groups_BGQ=groups_BGQ)["received"]


@statistics.register("value_norm_by_head")
class ValueNormByHead(ValueNorm):
    """Norm ‖v_j‖ of every token's value in every query head.

    Over the mean of the other keys it is ρ of arXiv 2606.08105, section 3: near 0 the sink is a
    no-operation, near 1 it may broadcast.
    """

    axes = KEYS

    def measure(self, call: Call) -> Tensor:
        norms_BKS = value_norms(self.vectors(call), per_head=True)
        return call.of_heads(call.expand_kv(norms_BKS))


@statistics.register("key_norm_by_head")
class KeyNormByHead(ValueNormByHead):
    """Norm ‖k_j‖ of every token's key in every query head, as it enters the scores.

    Gu et al. (arXiv 2410.10781, section 3.1): a causal sink's key is short, and its direction makes
    the score; see `KeyCosine`.
    """

    def vectors(self, call: Call) -> Tensor:
        return call.k_BKSD


@statistics.register("key_cosine")
class KeyCosine(Statistic):
    """Mean of cos θ_ij over the queries i that see key j, edits included, −1 to 1; 0 for a key that
    none sees.

    The score is q·k_j = ‖q‖ ‖k_j‖ cos θ_ij (arXiv 2601.07894; Gu et al., arXiv 2410.10781, section
    3.1). Costs one product of the size of the scores.
    """

    axes = KEYS

    def measure(self, call: Call) -> Tensor:
        q_BHQD = normalize(call.q_BHQD.detach().float(), dim=-1)
        key_BHSD = call.expand_kv(normalize(call.k_BKSD.detach().float(), dim=-1))
        real_BQ1 = real_weight(call.visibility.real_BQ, q_BHQD[:, 0])
        seen_BHQS = allowed(dense_mask(call)).expand(*q_BHQD.shape[:3], -1).to(q_BHQD)
        sum_BHSD = torch.einsum("bhqs,bhqd->bhsd", seen_BHQS, q_BHQD * real_BQ1[:, None])
        count_BHS = seen_after(call, call.visibility.counted_BQ).clamp_min(1)
        return call.of_heads((sum_BHSD * key_BHSD).sum(-1) / count_BHS)


@statistics.register("drift")
@dataclass(frozen=True)
class Drift(Statistic, Checked):
    """Change 1 − cos of every token's key, or value, since the last recorded step, 0 to 2
    (Elastic-Cache, arXiv 2510.14973, whose caches rest on «the most attended token drifts least»).

    NaN in the first step, and for a key that was not there before.
    """

    of: str = limited("key", one_of=("key", "value"))
    """Vectors that are compared."""

    axes = KEYS

    def measure(self, call: Call) -> Tensor:
        vectors = {"key": call.k_BKSD, "value": call.v_BKSD}
        now_BKSD = vectors[self.of].detach().float()
        before_BKSD = call.memory.get("before")
        call.memory["before"] = now_BKSD.clone()
        drift_BKS = torch.full(now_BKSD.shape[:3], torch.nan, device=now_BKSD.device)
        if before_BKSD is not None and before_BKSD.shape[:2] == now_BKSD.shape[:2]:
            both = min(before_BKSD.shape[2], now_BKSD.shape[2])
            parts = (now_BKSD[:, :, :both], before_BKSD[:, :, :both])
            drift_BKS[..., :both] = 1 - cosine_similarity(*parts, dim=-1)
        return call.of_heads(call.expand_kv(drift_BKS))


@statistics.register("head_output")
class HeadOutput(Statistic):
    """Stable rank ‖AV‖_F² / ‖AV‖₂² of a head's output, and the mean cosine of its rows to their
    mean (arXiv 2606.08105).

    Both near 1: the head broadcasts one vector. Rows of padding are left out; an output of zeros
    has rank and cosine 0.
    """

    axes = ("batch", "layer", "head", "number")
    columns = ("stable_rank", "cosine")

    def measure(self, call: Call) -> Tensor:
        out_BHQD = call.out_BHQD.detach().float()
        real_BQ1 = real_weight(call.visibility.real_BQ, out_BHQD[:, 0])
        out_BHQD = out_BHQD * real_BQ1[:, None]
        singular_BHD = torch.linalg.svdvals(out_BHQD)
        square_BHD = singular_BHD.square()
        rank_BH = square_BHD.sum(-1) / square_BHD[..., 0].clamp_min(1e-30)
        # the mean's length does not count, nor do rows of padding, whose cosine is 0
        cosine_BHQ = cosine_similarity(out_BHQD, out_BHQD.sum(2, keepdim=True), dim=-1)
        return torch.stack([rank_BH, cosine_BHQ.sum(-1) / real_BQ1.sum(1).clamp_min(1)], -1)


@statistics.register("massive_activations")
@dataclass(frozen=True)
class MassiveActivations(Statistic, Checked):
    """The greatest magnitudes in the hidden states after each decoder layer, by row.

    Sources: arXiv 2402.17762 and 2603.05498.

    Along the axis "number": the value itself with its sign, its channel, its canvas position
    (padding counted, sink columns not), and the ratio of its magnitude to the median magnitude
    (`columns`). Hidden states are the residual stream as it leaves the layer. The median that a
    magnitude is divided by is that of |x| over all channels of all positions of the row that ran
    (under a cache not all do), padding and the model's own sink columns left out. Sun et al. call
    an activation massive from |x| > 100 and a ratio of 1000 on.
    """

    top: int = limited(3, at_least=1)
    """Number of (position, channel) pairs, by falling magnitude."""

    axes = ("batch", "layer", "rank", "number")
    columns = ("value", "channel", "position", "ratio")
    of_states = True

    def measure(self, view: StatesView) -> Tensor:
        states_BN = view.states_BQD.detach().float().flatten(1)
        width = view.states_BQD.shape[2]
        size_BN = states_BN.abs()
        if view.real_BQ is not None:
            real_BN = view.real_BQ.to(size_BN.device).repeat_interleave(width, 1)
            size_BN = size_BN.masked_fill(~real_BN, torch.nan)
        greatest_BR, at_BR = size_BN.nan_to_num(-1).topk(min(self.top, size_BN.shape[1]))
        position_BR = view.columns_Q.to(at_BR.device)[at_BR // width]
        ratio_BR = greatest_BR / nan_median(size_BN)
        return torch.stack([states_BN.gather(1, at_BR), at_BR % width, position_BR, ratio_BR], -1)


def nan_median(x_BN: Tensor) -> Tensor:
    """The median of each row, (B, 1), NaN apart."""
    # torch's gives a row to one processor, of which a GPU has a hundred
    return sorted_median(x_BN) if x_BN.is_cuda else x_BN.nanmedian(1, True).values


def sorted_median(x_BN: Tensor) -> Tensor:
    """The same from sorted rows, in which NaN comes last."""
    middle_B1 = ((~x_BN.isnan()).sum(1, keepdim=True) - 1).clamp_min(0) // 2
    return x_BN.sort(1).values.gather(1, middle_B1)


@statistics.register("outliers")
class Outliers(Statistic):
    """Kurtosis E[(h − μ)⁴] / σ⁴ of a hidden state over its channels, and its greatest magnitude
    over the median one, each the mean over positions that are not padding.

    Sources: Bondarenko et al., arXiv 2306.12929, and arXiv 2605.06366 (max over median). A normal
    distribution has kurtosis 3.
    """

    axes = ("batch", "layer", "number")
    columns = ("kurtosis", "max_over_median")
    of_states = True

    def measure(self, view: StatesView) -> Tensor:
        states_BQD = view.states_BQD.detach().float()
        apart_BQD = states_BQD - states_BQD.mean(-1, keepdim=True)
        variance_BQ = apart_BQD.square().mean(-1).clamp_min(1e-30)
        kurtosis_BQ = apart_BQD.pow(4).mean(-1) / variance_BQ.square()
        size_BQD = states_BQD.abs()
        ratio_BQ = size_BQD.amax(-1) / size_BQD.median(-1).values.clamp_min(1e-30)
        numbers_BQ2 = torch.stack([kurtosis_BQ, ratio_BQ], -1)
        return mean_over_positions(numbers_BQ2, view.real_BQ)


@statistics.register("layer_similarity")
class LayerSimilarity(Statistic):
    """Mean cosine of the hidden states of two layers, over all pairs of the recorded layers up to
    this one, −1 to 1; of the first layer alone 1. The last layer has that of the whole model.

    Raw: S_ab = mean_i cos(h_i^a, h_i^b) over positions that are not padding; pooled: the cosine of
    their means; detrended: each channel of a position less its mean over these layers, by its
    deviation (arXiv 2605.06366). Keeps the hidden states of all layers of a forward.
    """

    axes = ("batch", "layer", "number")
    columns = ("raw", "pooled", "detrended")
    of_states = True

    def measure(self, view: StatesView) -> Tensor:
        before: list[Tensor] = view.memory.setdefault("states", [])
        before.append(view.states_BQD.detach().float())
        if len(before) == 1:
            return before[0].new_ones(len(before[0]), 3)
        states_LBQD = torch.stack(before)
        pooled_LBD = torch.stack([mean_over_positions(one, view.real_BQ) for one in before])
        detrended_LBQD = (states_LBQD - states_LBQD.mean(0)) / states_LBQD.std(0).clamp_min(1e-12)
        raw_BQ, detrended_BQ = mean_cosine(states_LBQD), mean_cosine(detrended_LBQD)
        raw_B2 = mean_over_positions(torch.stack([raw_BQ, detrended_BQ], -1), view.real_BQ)
        return torch.stack([raw_B2[:, 0], mean_cosine(pooled_LBD), raw_B2[:, 1]], -1)


def mean_cosine(states_LXD: Tensor) -> Tensor:
    """Mean cosine of two different layers, (…)."""
    layers = len(states_LXD)
    # the square of a sum holds every pair twice, and each layer with itself
    square_X = normalize(states_LXD, dim=-1).sum(0).square().sum(-1)
    return (square_X - layers) / (layers * (layers - 1))


def mean_over_positions(numbers_BQX: Tensor, real_BQ: Tensor | None) -> Tensor:
    """Mean over the positions of a row that are not padding."""
    real_BQ1 = real_weight(real_BQ, numbers_BQX)
    return (numbers_BQX * real_BQ1).sum(1) / real_BQ1.sum(1).clamp_min(1)
