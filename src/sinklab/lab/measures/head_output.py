"""Shape of a head's output: does it write one vector to every position?"""

# B batch, H query heads (those recorded), Q queries, D head dim
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from sinklab.core.probing.statistics import CallView, Statistic
from sinklab.core.registry import statistics
from sinklab.lab.scoring.hidden_states import real_weight


@statistics.register("head_output")
class HeadOutput(Statistic):
    """Stable rank ‖AV‖_F² / ‖AV‖₂² of a head's output, and the mean cosine of its rows to their
    mean (arXiv 2606.08105).

    Both near 1: the head broadcasts one vector. Rows of padding are left out; an output of zeros
    has rank and cosine 0.
    """

    axes = ("batch", "layer", "head", "number")
    columns = ("stable_rank", "cosine")

    def measure(self, view: CallView) -> Tensor:
        out_BHQD = view.of_heads(view.output_BHQD.detach().float())
        real_BQ1 = real_weight(view.call.visibility.real_BQ, out_BHQD[:, 0])
        out_BHQD = out_BHQD * real_BQ1[:, None]
        singular_BHD = torch.linalg.svdvals(out_BHQD)
        square_BHD = singular_BHD.square()
        rank_BH = square_BHD.sum(-1) / square_BHD[..., 0].clamp_min(1e-30)
        # the mean's length does not count, nor do rows of padding, whose cosine is 0
        cosine_BHQ = cosine_similarity(out_BHQD, out_BHQD.sum(2, keepdim=True), dim=-1)
        return torch.stack([rank_BH, cosine_BHQ.sum(-1) / real_BQ1.sum(1).clamp_min(1)], -1)
