"""Block caches that evict or refresh keys and values: their policies, and the store."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    blocks="BlockCache CommittedCache DualCache PrefixCache",
    policies="ChoosingCache EvictCache EvictingCache RandomCache ReceivedCache SinkCache "
    "SinkRefreshCache",
    store="Seen",
)
