"""A selector of the keys behind the first: the strongest of a head stay, what follows goes."""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from sinklab.core.errors import limited
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.probing import BlockKeys, KeyView, Selector, intervene, trace
from sinklab.core.registry import selectors
from sinklab.core.sampling import Canvas, denoise


@selectors.register("runners_up")
@dataclass(frozen=True)
class RunnersUp(Selector):
    """The ``k`` keys that receive most behind the ``after`` strongest ones, which stay."""

    k: int = limited(1, at_least=1)
    """keys of a head to take away"""
    after: int = limited(1, at_least=1)
    """stronger keys that stay"""

    @property
    def most(self) -> int | None:
        return self.k

    def select(self, view: KeyView) -> torch.Tensor:
        free_BHS = view.free_BHS
        order_BHS = view.scores_BHS.masked_fill(~free_BHS, -torch.inf)
        strongest_BHM = order_BHS.topk(min(self.after, order_BHS.shape[-1]), -1).indices
        others_BHS = free_BHS.scatter(-1, strongest_BHM, False)
        return view.top(view.scores_BHS, self.k, others_BHS, self.most)


def test_the_second_strongest_key_is_blocked_and_the_strongest_stays() -> None:
    torch.manual_seed(2)
    backbone = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.5,
    )  # fmt: skip
    model = DiffusionLM(DiffusionLMConfig(backbone=backbone, mask_token_id=31)).eval()
    canvas = Canvas.from_prompts([[1, 2, 3]], new_tokens=8, mask_id=31)
    with trace(model) as clean:
        next(denoise(model, canvas, steps=4))
    edit = BlockKeys(RunnersUp(), when="now", layers=0)
    with intervene(model, edit) as log, trace(model) as edited:
        next(denoise(model, canvas, steps=4))
    # nothing in front of the first layer has changed
    before, after = (torch.from_numpy(x.array("received")[0, :, 0]) for x in (clean, edited))
    ranked = before.argsort(-1, descending=True)
    (record,) = log.removals
    assert torch.equal(record.columns_BLHM[:, 0, :, 0], ranked[..., 1])
    assert (after.gather(-1, ranked[..., 1:2]) == 0).all()
    assert (after.gather(-1, ranked[..., :1]) > before.gather(-1, ranked[..., :1])).all()
    assert 0 < log.dose().removed < 0.5 and log.dose().keys == 1
    assert selectors.as_text(selectors.parse("runners_up:k=2")) == "runners_up:k=2"
