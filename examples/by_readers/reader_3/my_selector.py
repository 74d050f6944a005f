"""The keys of smallest values, for `BlockKeys`: those from which a query reads least."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig

from sinklab import DiffusionLM, DiffusionLMConfig, intervene, trace
from sinklab.core.errors import limited
from sinklab.core.probing import BlockKeys, KeyView, Selector
from sinklab.core.registry import selectors


@selectors.register("smallest_values")
@dataclass(frozen=True)
class SmallestValues(Selector):
    """The k keys of smallest value norm in each head, whatever they receive (arXiv 2601.19657)."""

    k: int = limited(1, at_least=1)
    """Keys a head."""

    @property
    def most(self) -> int | None:
        return self.k

    def select(self, view: KeyView) -> Tensor:
        norm_BHS = torch.linalg.vector_norm(view.values_BHSD.detach(), dim=-1, dtype=torch.float32)
        return view.top(-norm_BHS, self.k)


def test_the_keys_of_smallest_values_receive_nothing() -> None:
    torch.manual_seed(3)
    backbone = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=31)).eval()
    ids_BS = torch.randint(0, 31, (2, 12))
    with torch.no_grad():
        layer = model.model.layers[0]
        values = layer.self_attn.v_proj(layer.input_layernorm(model.model.embed_tokens(ids_BS)))
        norm_BHS = values.view(2, 12, 2, 4).norm(dim=-1).transpose(1, 2).repeat_interleave(2, 1)
        smallest_BHM = norm_BHS.topk(3, largest=False).indices
        edit = BlockKeys("smallest_values:k=3", when="now")
        with intervene(model, edit) as log, trace(model, ("received",)) as recording:
            model(ids_BS)
    received_BHS = torch.from_numpy(recording.array("received"))[0, :, 0]
    assert (received_BHS.gather(-1, smallest_BHM) == 0).all()
    assert (received_BHS == 0).sum() == 2 * 4 * 3
    assert log.dose().keys == 3 and 0 < log.dose().removed < 1
