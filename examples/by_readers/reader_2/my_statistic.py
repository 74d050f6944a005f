"""A statistic of how many keys a head's attention rests on: 1 / Σ p², of order two."""

import numpy as np
import torch
from transformers import LlamaConfig

from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.probing import BlockKeys, CallView, Statistic, TopKeys, intervene, trace
from sinklab.core.registry import statistics
from sinklab.core.sampling import Canvas, denoise


@statistics.register("effective_keys")
class EffectiveKeys(Statistic):
    """The number of keys that would receive as unequally if they shared alike: (Σ a)² / Σ a².

    From 1, where one key receives everything, to the number of keys; a sink lowers it.
    """

    axes = ("batch", "layer", "head")
    by_row = True
    reads = ("received",)

    def measure(self, view: CallView) -> torch.Tensor:
        received_BHS = view.shared["received"]
        return received_BHS.sum(-1).square() / received_BHS.square().sum(-1)


def test_it_is_the_participation_ratio_and_falls_by_the_keys_that_are_blocked() -> None:
    torch.manual_seed(2)
    backbone = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.5,
    )  # fmt: skip
    model = DiffusionLM(DiffusionLMConfig(backbone=backbone, mask_token_id=31)).eval()
    canvas = Canvas.from_prompts([[1, 2, 3], [4, 5]], new_tokens=8, mask_id=31, pad_id=0)
    with trace(model, ("received", "effective_keys")) as recording:
        for step in denoise(model, canvas, steps=4):
            recording.mark(step)
    found = recording.array("effective_keys")
    assert found.shape == (4, 2, 2, 2)
    assert recording.dims("effective_keys") == ("step", "batch", "layer", "head")
    share = recording.array("received")
    share = share / share.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, 1 / (share**2).sum(-1), rtol=1e-5)
    # all but one key of a head are blocked: one is left to rest on
    prompt = Canvas.from_prompts([[1, 2, 3]], new_tokens=8, mask_id=31)
    edit = BlockKeys(TopKeys(10), when="now")
    with intervene(model, edit), trace(model, ("effective_keys",)) as blocked:
        next(denoise(model, prompt))
    np.testing.assert_allclose(blocked.array("effective_keys"), 1, rtol=1e-6)
