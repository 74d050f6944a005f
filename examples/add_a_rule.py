"""A sink rule of your own: one class, usable wherever the package takes a rule.

On the command line give the file itself: ``--plugin add_a_rule.py``; the rule is then written
share:part=0.2. ``sinklab check add_a_rule.py share:part=0.2`` holds it to what every part of the
package relies on.
"""

from dataclasses import dataclass
from typing import Any

from sinklab.core.registry import rules
from sinklab.core.sinks import namespace
from sinklab.lab.cli import main


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
    raise SystemExit(main(["check", __file__]))
