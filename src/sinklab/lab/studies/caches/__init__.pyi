from .study import Caches as Caches
from .study import CacheSettings as CacheSettings
from .study import cache_fidelity as cache_fidelity
