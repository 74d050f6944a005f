"""Similarity of layers: do they give one hidden state on to the next?"""

# B batch, L layers so far, Q positions, D width of hidden states, X any axes
import torch
from torch import Tensor
from torch.nn.functional import normalize

from sinklab.core.probing.statistics import StatesView, Statistic
from sinklab.core.registry import statistics
from sinklab.lab.scoring.hidden_states import mean_over_positions


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
