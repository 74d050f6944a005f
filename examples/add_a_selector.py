"""A selector of your own: the keys that many heads of a layer call a sink.

A function of one attention call (`Call`) is all there is to it; its other arguments are its
options. `--plugin add_a_selector.py` makes it a choice of every command that takes edits;
``sinklab check add_a_selector.py`` blocks the keys that it selects.
"""

from sinklab import Excess
from sinklab.core.registry import registered, rules, selectors
from sinklab.core.sinks import Rule
from sinklab.lab.cli import main


@selectors.register("shared_sinks")
def shared_sinks(call, share=0.5, rule: Rule = registered(rules, Excess(epsilon=3.0))):
    """The keys that a rule calls sinks in at least this share of the heads."""
    shares_B1S = call.sinks(rule).float().mean(1, keepdim=True)
    return call.eligible_BHS & (shares_B1S >= share)


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__, "shared_sinks:share=0.25"]))
