"""A sink rule of your own: one class, usable wherever the package takes a rule.

On the command line give the file itself: ``--plugin add_a_rule.py``; the rule is then written
share:part=0.2.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sinklab.core.registry import rules
from sinklab.core.sinks import find_sinks, namespace
from sinklab.lab.analysis import motion
from sinklab.lab.testing import check_rule


@rules.register("share")
@dataclass(frozen=True)
class Share:
    """A key is a sink when it receives more than this part of all the attention of its head."""

    part: float = 0.1
    """part to exceed, between 0 and 1"""

    def __call__(self, received: Any, queries: Any, exists: Any) -> Any:
        """Which keys, boolean (..., key); ``queries`` see each key, and some query sees those that
        exist.
        """
        whole = namespace(received).where(exists, received, 0).sum(-1)[..., None]
        return received > self.part * whole


if __name__ == "__main__":
    check_rule(Share(0.2))
    assert rules.parse("share:part=0.2") == Share(0.2)
    received_TLHK = np.array([16.0, 4.0] + [1.0] * 12 + [0.0] * 18) * np.ones((8, 2, 4, 1))
    assert find_sinks(received_TLHK, Share(0.2))[0, 0, 0].nonzero()[0].tolist() == [0]
    assert find_sinks(received_TLHK, Share(0.1)).sum(-1).max() == 2, "4 of 32 is more than a tenth"
    print("mobility of the main sink:", motion(received_TLHK, rule=Share()).overall.mobility)
