"""A selector of keys: those whose values are smallest, whatever attention they get."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig

from sinklab.core.errors import limited
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.probing import BlockKeys, KeyView, Selector, intervene, trace
from sinklab.core.registry import selectors


@selectors.register("smallest_values")
@dataclass(frozen=True)
class SmallestValues(Selector):
    """The k keys of least value norm: those that add least where attention rests on them."""

    k: int = limited(1, at_least=1)
    """Keys a head."""

    @property
    def most(self) -> int | None:
        return self.k

    def select(self, view: KeyView) -> Tensor:
        """The free keys of least norm."""
        return view.top(-view.values_BHSD.float().norm(dim=-1), self.k)


def tiny_model() -> DiffusionLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    backbone = LlamaConfig(**sizes, **heads, max_position_embeddings=32)
    return DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=31)).eval()


def test_key_without_a_value_is_taken_first() -> None:
    model, ids_BS = tiny_model(), torch.arange(12)[None]
    silent = 5
    with torch.no_grad():
        # values of the first layer follow from the token alone
        model.model.embed_tokens.weight[silent] = 0
        edit = BlockKeys(SmallestValues(), when="now")
        with intervene(model, edit) as log, trace(model, ("received",)) as recording:
            model(ids_BS)
    (removal,) = log.removals
    assert removal.columns_BLHM.shape == (1, 2, 4, 1)
    assert (removal.columns_BLHM[:, 0] == silent).all()
    received_LHS = torch.from_numpy(recording.array("received")[0, 0])
    assert (received_LHS[0, :, silent] == 0).all()
    assert (received_LHS == 0).sum() == removal.keys_BLH.sum() == 8
    # heads 0 and 1, and 2 and 3, share values, and so lose the same key
    assert torch.equal(removal.columns_BLHM[:, :, ::2], removal.columns_BLHM[:, :, 1::2])
    assert 0 < log.dose().removed < 1

    with torch.no_grad(), intervene(model, "block_keys:keys=(smallest_values:k=2),when=now") as log:
        model(ids_BS)
    assert log.dose().keys == 2
