"""A cache in one file: the columns near the block are computed anew with it. It runs as it stands.
Load it by --plugin FILE.

One method is all there is to it; keys and values of the other columns stay as they were. A cache
that decides by the attention it sees has a session of its own: see studies/sink_caches.py.
"""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.registry import caches
from sinklab.core.sampling import Cache


@caches.register("near")
@dataclass(frozen=True)
class NearCache(Cache):
    """Compute the block and so many columns on either side; everything when a block begins."""

    width: int = 4

    def columns(self, start, stop, length, nth):
        if nth == 0:
            return None
        return slice(max(start - self.width, 0), min(stop + self.width, length))


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = DiffusionLMConfig(LlamaConfig(**sizes, num_attention_heads=4), mask_token_id=59)
    model, prompt = DiffusionLM(config).eval(), torch.arange(12)[None]
    whole, dual, near, alone, everything = (
        model.generate(prompt, max_new_tokens=16, block_length=8, cache=cache)
        for cache in ("none", "dual", "near", "near:width=0", "near:width=99")
    )
    assert near.shape == whole.shape and torch.equal(alone, dual)
    assert torch.equal(everything, whole)
