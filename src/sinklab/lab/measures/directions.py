"""Direction of keys: is a key strong because its direction is near that of the queries?"""

# B batch, H query heads (those recorded), Q queries, S keys, D head dim
import torch
from torch import Tensor
from torch.nn.functional import normalize

from sinklab.core.attention.scores import allowed
from sinklab.core.probing.interventions.removals import own_mask
from sinklab.core.probing.statistics import KEYS, CallView, Statistic
from sinklab.core.registry import statistics
from sinklab.lab.scoring.hidden_states import real_weight


@statistics.register("key_cosine")
class KeyCosine(Statistic):
    """Mean of cos θ_ij over the queries i that see key j, −1 to 1; 0 for a key that none sees.

    The score is q·k_j = ‖q‖ ‖k_j‖ cos θ_ij (arXiv 2601.07894; Gu et al., arXiv 2410.10781, section
    3.1). Costs one product of the size of the scores.
    """

    axes = KEYS

    def measure(self, view: CallView) -> Tensor:
        call = view.call
        query_BHQD = normalize(call.query_BHQD.detach().float(), dim=-1)
        key_BHSD = call.for_query_heads(normalize(call.key_BKSD.detach().float(), dim=-1))
        real_BQ1 = real_weight(call.visibility.real_BQ, query_BHQD[:, 0])
        seen_BHQS = allowed(own_mask(call)).expand(*query_BHQD.shape[:3], -1).to(query_BHQD)
        sum_BHSD = torch.einsum("bhqs,bhqd->bhsd", seen_BHQS, query_BHQD * real_BQ1[:, None])
        count_BHS = call.visibility.visible_BHS.clamp_min(1)
        return view.of_heads((sum_BHSD * key_BHSD).sum(-1) / count_BHS)
