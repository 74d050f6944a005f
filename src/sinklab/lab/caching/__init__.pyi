from .blocks import BlockCache as BlockCache
from .blocks import CommittedCache as CommittedCache
from .blocks import DualCache as DualCache
from .blocks import PrefixCache as PrefixCache
