"""The number of keys that share a head's attention, for `trace`."""

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from sinklab import DiffusionLM, DiffusionLMConfig, trace
from sinklab.core.probing import CallView, Statistic
from sinklab.core.registry import statistics


@statistics.register("effective_keys")
class EffectiveKeys(Statistic):
    """The exponential of the entropy of what keys receive: 1 if one takes all, S if S share evenly.

    NaN in a head without a query that sees a key.
    """

    axes = ("batch", "layer", "head")
    by_row = True
    reads = ("received",)

    def measure(self, view: CallView) -> Tensor:
        received_BHS = view.shared["received"]
        share_BHS = received_BHS / received_BHS.sum(-1, keepdim=True)
        return torch.special.entr(share_BHS).sum(-1).exp()


def test_effective_keys_are_those_of_the_column_sums() -> None:
    torch.manual_seed(3)
    backbone = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=31)).eval()
    real_BS = torch.ones(2, 10, dtype=torch.bool)
    real_BS[0, :4] = False
    names = ("received", "effective_keys")
    with trace(model, names, heads=(3, 0)) as recording, torch.no_grad():
        model(torch.randint(0, 31, (2, 10)), real_BS)
        model(torch.randint(0, 31, (2, 1)))
    effective = recording.array("effective_keys")
    assert effective.shape == (2, 2, 3, 2)
    a = recording.array("received")[0]
    p = a / a.sum(-1, keepdims=True)
    expected = np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum(-1))
    np.testing.assert_allclose(effective[0], expected, rtol=1e-5)
    assert (effective[0, 0] <= 6 + 1e-4).all() and effective[0, 1].max() > 6
    np.testing.assert_allclose(effective[1], 1, rtol=1e-5)
