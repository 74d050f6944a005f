"""The soft rule of Sink-Aware Pruning, as a rule for sinks."""

from dataclasses import dataclass
from typing import Any

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import rules
from sinklab.core.sinks import namespace, where_exists


@rules.register("soft")
@dataclass(frozen=True)
class Soft(Checked):
    """A sink has a soft mask σ(α (m_j − μ − 2σ)) of at least ``least`` (arXiv 2602.17664).

    m_j is the attention that the key receives in units of an even share, μ and σ its mean and
    standard deviation over the keys of the head. With ``least`` = 0.5 the slope does not matter,
    and the rule is ``Excess(2, "zscore")``.
    """

    alpha: float = limited(5.0, above=0)
    """Slope α."""
    least: float = limited(0.5, at_least=0, below=1)
    """The mask from which a key counts as a sink, 0 to 1."""

    def mask(self, received: Any, seen_by: Any, exists: Any) -> Any:
        """The soft mask itself, 0 to 1, of the shape of ``received``."""
        xp = namespace(received)
        most = xp.amax(where_exists(exists, received * 0 + seen_by), -1)[..., None]
        mass = where_exists(exists, received / seen_by * most)
        count = exists.sum(-1)[..., None].clip(1)
        mean = mass.sum(-1)[..., None] / count
        apart = where_exists(exists, mass - mean)
        deviation = ((apart * apart).sum(-1)[..., None] / count) ** 0.5
        return 1 / (1 + xp.exp(-self.alpha * (apart - 2 * deviation)))

    def __call__(self, received: Any, seen_by: Any, exists: Any) -> Any:
        """Flags of keys whose mask is above `least`."""
        return self.mask(received, seen_by, exists) > self.least
