"""A sink rule: one key that receives many times as much as the next one."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig

from sinklab.core.errors import Checked, limited
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.probing import BlockKeys, Positions, intervene, trace
from sinklab.core.registry import rules
from sinklab.core.sinks import find_sinks, namespace
from sinklab.core.sinks import only


@rules.register("lone")
@dataclass(frozen=True)
class Lone(Checked):
    """The strongest key of a head, if it gets ``factor`` times the mean weight of the next one.

    A head has one sink or none; of keys that tie for the first place none is a sink.
    """

    factor: float = limited(3.0, at_least=1)
    """how many times the mean weight of the second strongest key to exceed"""

    def __call__(self, received: Any, queries: Any, exists: Any) -> Any:
        """Flags of the lone key."""
        xp = namespace(received)
        weight = only(exists, received / queries, -float("inf"))
        best = xp.amax(weight, -1)[..., None]
        is_best = weight == best
        second = xp.amax(only(~is_best, weight, 0.0), -1)[..., None]
        return is_best & (is_best.sum(-1)[..., None] == 1) & (best > self.factor * second)


def tiny_model() -> DiffusionLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    backbone = LlamaConfig(**sizes, **heads, max_position_embeddings=32)
    return DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=31)).eval()


def test_lone_finds_the_only_key_that_is_left() -> None:
    model, ids_BS, kept = tiny_model(), torch.arange(12)[None], 3
    others = Positions(tuple(j for j in range(12) if j != kept))
    found = []
    for edits in ((), (BlockKeys(others, when="now"),)):
        with torch.no_grad(), intervene(model, *edits), trace(model, ("received",)) as recording:
            model(ids_BS)
        visible = recording.array("visible")[:, :, None, None]
        found.append(find_sinks(recording.array("received"), "lone:factor=2", visible))
    even, edited = found
    assert not even.any()
    assert edited[..., kept].all()
    assert edited.sum() == edited[..., kept].size

    for kind in (torch.tensor, lambda rows: torch.tensor(rows).numpy()):
        sums = kind([[2.9, 1.0, 0.1, 0.0], [3.1, 0.8, 0.1, 0.0], [2.0, 2.0, 0.0, 0.0]])
        flags = find_sinks(sums, Lone(3.0), kind([4]))
        assert flags.tolist() == [[False] * 4, [True, False, False, False], [False] * 4]
