"""A cache in one file: the first columns and those nearest to the block (StreamingLLM's). It runs
as it stands. One that evicts nothing has one method, `columns`: see
`sinklab.lab.caching.DualCache`. Load it by --plugin FILE.
"""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.registry import caches
from sinklab.lab.caching import ChoosingCache


@caches.register("streaming")
@dataclass(frozen=True)
class StreamingCache(ChoosingCache):
    """Keep the first columns of the text and those nearest to the block. Source: StreamingLLM
    (2309.17453).
    """

    first: int = 4
    window: int = 16

    def counts(self, candidates_BS):
        return candidates_BS.sum(1).clamp(max=self.first + self.window)

    def ranks(self, seen):
        column_S = torch.arange(seen.candidates_BS.shape[1], device=seen.candidates_BS.device)
        nearness_S = -torch.maximum(seen.block.start - column_S, column_S - seen.block.stop + 1)
        is_first_BS = seen.candidates_BS.cumsum(1) <= self.first
        return (nearness_S + len(column_S) * is_first_BS)[:, None]


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = DiffusionLMConfig(LlamaConfig(**sizes, num_attention_heads=4), mask_token_id=59)
    model, prompt = DiffusionLM(config).eval(), torch.arange(12)[None]
    whole, dual = (
        model.generate(prompt, max_new_tokens=16, block_length=8, cache=c) for c in ("none", "dual")
    )
    short = model.generate(
        prompt, max_new_tokens=16, block_length=8, cache="streaming:first=2,window=4"
    )
    everything = model.generate(
        prompt, max_new_tokens=16, block_length=8, cache="streaming:window=99"
    )
    assert whole.shape == short.shape and torch.equal(everything, dual)
