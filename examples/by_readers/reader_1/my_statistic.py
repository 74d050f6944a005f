"""A statistic: the number of keys among which a head's attention is spread."""

import torch
from torch import Tensor
from transformers import LlamaConfig

from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.probing import BlockKeys, CallView, Positions, Statistic, intervene, trace
from sinklab.core.registry import statistics


@statistics.register("effective_keys")
class EffectiveKeys(Statistic):
    """The effective number of keys of a head: exp of the entropy of their shares of its attention.

    The number of keys if all receive alike, 1 if one receives everything (Hill's number of order 1).
    """

    axes = ("batch", "layer", "head")
    by_row = True
    reads = ("received",)

    def measure(self, view: CallView) -> Tensor:
        received_BHS = view.shared["received"]
        share_BHS = received_BHS / received_BHS.sum(-1, keepdim=True)
        return torch.special.entr(share_BHS).sum(-1).exp()


def tiny_model() -> DiffusionLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    backbone = LlamaConfig(**sizes, **heads, max_position_embeddings=32)
    return DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=31)).eval()


def test_effective_keys_counts_the_keys_that_are_used() -> None:
    model, ids_BS = tiny_model(), torch.arange(24).view(2, 12)
    attention_BS = torch.ones(2, 12, dtype=torch.bool)
    attention_BS[0, :3] = False

    def effective(*edits: BlockKeys) -> Tensor:
        with torch.no_grad(), intervene(model, *edits):
            with trace(model, ("effective_keys",)) as recording:
                model(ids_BS, attention_BS)
        assert recording.dims("effective_keys") == ("step", "batch", "layer", "head")
        return torch.from_numpy(recording.array("effective_keys"))

    keys_B11 = torch.tensor([9, 12])[:, None, None]
    uneven = effective()
    assert uneven.shape == (1, 2, 2, 4)
    assert ((uneven > 1) & (uneven < keys_B11)).all()
    assert (effective(BlockKeys(Positions((3, 11)), when="now")) < keys_B11 - 2).all()

    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    torch.testing.assert_close(effective(), keys_B11.float().expand(1, 2, 2, 4))
    window = effective(BlockKeys(Positions(tuple(range(3, 11))), when="now"))
    torch.testing.assert_close(window, torch.tensor([1.0, 4.0])[:, None, None].expand(1, 2, 2, 4))
