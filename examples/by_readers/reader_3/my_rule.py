"""Tukey's far-out keys as sinks, for `find_sinks`, `SinkKeys` and reports."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from sinklab import DiffusionLM, DiffusionLMConfig, find_sinks, trace
from sinklab.core.errors import Checked, limited
from sinklab.core.registry import rules
from sinklab.core.sinks import namespace, only


@rules.register("far_out")
@dataclass(frozen=True)
class FarOut(Checked):
    """A sink's mean weight lies more than ``fences`` interquartile ranges above the third quartile.

    Quartiles are those of the keys of the same head that exist (Tukey 1977: 3 is "far out").
    """

    fences: float = limited(3.0, at_least=0, remedy="Tukey uses 1.5 and 3")
    """interquartile ranges above the third quartile"""

    def __call__(self, received: Any, queries: Any, exists: Any) -> Any:
        """Flags of keys beyond the fence."""
        xp = namespace(received)
        weight = received / queries
        known = only(exists, weight, float("nan"))
        # numpy warns of quartiles of nothing
        known = only(exists.any(-1)[..., None], known)
        low, high = (xp.nanquantile(known, part, -1)[..., None] for part in (0.25, 0.75))
        return weight > high + self.fences * (high - low)


def test_far_out_keys_are_those_beyond_the_fence() -> None:
    torch.manual_seed(3)
    backbone = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.6,
    )
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=31)).eval()
    ids_BS = torch.randint(0, 31, (3, 24))
    real_BS = torch.ones(3, 24, dtype=torch.bool)
    real_BS[0, :5] = False
    with trace(model, ("received",)) as recording, torch.no_grad():
        model(ids_BS, real_BS)
    received = recording.array("received")
    visible = recording.array("visible")[:, :, None, None]
    found = find_sinks(received, "far_out:fences=1.5", visible)

    weight = received[0, 0, ..., 5:] / visible[0, 0, ..., 5:]
    low, high = np.quantile(weight, (0.25, 0.75), axis=-1, keepdims=True)
    assert found.any() and not found[0, 0, ..., :5].any()
    assert (found[0, 0, ..., 5:] == (weight > high + 1.5 * (high - low))).all()
    assert find_sinks(received, FarOut(), visible).sum() < found.sum()
    tensors = (torch.from_numpy(part) for part in (received, visible))
    as_tensor = find_sinks(next(tensors), FarOut(1.5), next(tensors))
    assert (as_tensor.numpy() == found).all()
    assert not find_sinks(np.full((1, 9), np.nan), FarOut(), np.zeros((1, 9))).any()
