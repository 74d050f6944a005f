"""A statistic of your own: how much of a head's attention the key holds that receives most.

A function of one attention call is all there is to it. It says which axes it has and what it
reads, which the trace computes in one pass over the scores, for the layers and heads that are
recorded. Its other arguments are options. ``sinklab trace "The sea" --plugin add_a_statistic.py
--statistics largest_share`` keeps it in a run folder; ``sinklab check add_a_statistic.py`` records
it.
"""

from sinklab.core.registry import statistics
from sinklab.lab.cli import main


@statistics.register("largest_share", axes="head", reads="received")
def largest_share(call):
    """The share of a head's attention on the key that receives most."""
    return call.received_BHS.amax(-1) / call.received_BHS.sum(-1)


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__]))
