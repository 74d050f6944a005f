"""Massive activations of hidden states, and companions of them without a threshold."""

# B batch, Q positions, D width of hidden states, N numbers of a row, R the greatest that are kept
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.core.errors import Checked, limited
from sinklab.core.probing.statistics import StatesView, Statistic
from sinklab.core.registry import fast_medians, fast_path, statistics
from sinklab.lab.scoring.hidden_states import mean_over_positions


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
        median = fast_path(fast_medians, view.states_BQD) or nan_median
        ratio_BR = greatest_BR / median(size_BN)
        return torch.stack([states_BN.gather(1, at_BR), at_BR % width, position_BR, ratio_BR], -1)


def nan_median(x_BN: Tensor) -> Tensor:
    """The median of each row, (B, 1), NaN apart."""
    return x_BN.nanmedian(1, True).values


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
