"""A cache in one file: the first columns and those nearest to the block (StreamingLLM's). One that
evicts nothing has one method, `columns`: see `sinklab.lab.caching.DualCache`. ``sinklab generate
"The sea" --plugin add_a_cache.py --cache streaming`` writes under it; ``sinklab check
add_a_cache.py`` holds it to what the loop relies on.
"""

from dataclasses import dataclass

import torch

from sinklab.core.registry import caches
from sinklab.lab.caching import ChoosingCache
from sinklab.lab.cli import main


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
    raise SystemExit(main(["check", __file__]))
