"""A sink rule by the median: it is not moved by the sinks themselves, as a mean is."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from sinklab.core.errors import Checked, limited
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.probing import trace
from sinklab.core.registry import rules
from sinklab.core.sampling import Canvas, denoise
from sinklab.core.sinks import find_sinks, namespace


@rules.register("median")
@dataclass(frozen=True)
class Median(Checked):
    """A sink gets a mean weight above ``times`` the median one of the keys that some query sees.

    Of an even number of keys the median is the lower of the two in the middle.
    """

    times: float = limited(2.0, at_least=1, remedy="it is a multiple of the median")
    """how many times the median to exceed"""

    def __call__(self, received: Any, queries: Any, exists: Any) -> Any:
        """Flags of keys that exceed the multiple."""
        xp = namespace(received)
        weight = received / queries
        # keys that are not there go behind all others
        rising = xp.where(exists, weight, xp.zeros_like(weight) + float("inf"))
        order = xp.argsort(rising)
        take = np.take_along_axis if xp is np else xp.take_along_dim
        middle = (exists.sum(-1)[..., None].clip(1) - 1) // 2
        return weight > self.times * take(rising, take(order, middle, -1), -1)


def test_the_median_is_that_of_the_keys_and_the_same_in_numpy_and_torch() -> None:
    torch.manual_seed(2)
    backbone = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.5,
    )  # fmt: skip
    model = DiffusionLM(DiffusionLMConfig(backbone=backbone, mask_token_id=31)).eval()
    canvas = Canvas.from_prompts([[1, 2, 3], [4, 5]], new_tokens=8, mask_id=31, pad_id=0)
    with trace(model, ("received",)) as recording:
        for step in denoise(model, canvas, steps=4):
            recording.mark(step)
    received = recording.array("received")  # (step, batch, layer, head, key)
    visible = recording.array("visible")[:, :, None, None]
    found = find_sinks(received, "median:times=1.5", visible)
    # the row of the shorter prompt has a key that is padding
    mean_weight = np.where(visible > 0, received / np.maximum(visible, 1), np.nan)
    median = np.nanquantile(mean_weight, 0.5, axis=-1, keepdims=True, method="lower")
    assert found.any() and not found.all()
    assert np.array_equal(found, mean_weight > 1.5 * median)
    assert not found[:, 1, :, :, 0].any()
    tensors = find_sinks(torch.from_numpy(received), Median(1.5), torch.from_numpy(visible))
    assert np.array_equal(tensors.numpy(), found)
