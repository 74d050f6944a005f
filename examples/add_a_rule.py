"""A sink rule of your own: one function, usable wherever the package takes a rule.

On the command line give the file itself: ``--plugin add_a_rule.py``; the rule is then written
share:part=0.2. ``sinklab check add_a_rule.py share:part=0.2`` holds it to what every part of the
package relies on.
"""

from sinklab.core.registry import rules
from sinklab.core.sinks import namespace
from sinklab.lab.cli import main


@rules.register("share")
def share(received, seen_by, exists, part=0.1):
    """A key is a sink when it receives more than this part of all the attention of its head."""
    whole = namespace(received).where(exists, received, 0).sum(-1)[..., None]
    return received > part * whole


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__]))
