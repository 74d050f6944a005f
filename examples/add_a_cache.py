"""A cache in one file: the columns near the block are computed anew with it. ``sinklab generate
"The sea" --plugin add_a_cache.py --cache near`` writes under it; ``sinklab check add_a_cache.py``
holds it to what the loop relies on.

One method is all there is to it; keys and values of the other columns stay as they were. A cache
that decides by the attention it sees has a session of its own: see studies/sink_caches.py.
"""

from dataclasses import dataclass

from sinklab.core.registry import caches
from sinklab.core.subject import Cache
from sinklab.lab.cli import main


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
    raise SystemExit(main(["check", __file__]))
