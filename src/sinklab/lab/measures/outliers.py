"""Companions of massive activations without a threshold."""

# B batch, Q positions, D width of hidden states
import torch
from torch import Tensor

from sinklab.core.probing.statistics import StatesView, Statistic
from sinklab.core.registry import statistics
from sinklab.lab.scoring.hidden_states import mean_over_positions


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
