"""A statistic of your own: how much of a head's attention the key holds that receives most.

It says what it reads and which axes it has; the trace computes it beside the others, in one pass
over the scores, step by step, for the layers and heads that are recorded. Of a frozen dataclass the
fields are options: largest_share:k=3. ``sinklab trace "The sea" --plugin add_a_statistic.py
--statistics largest_share`` keeps it in a run folder; ``sinklab check
add_a_statistic.py`` records it.
"""

from torch import Tensor

from sinklab.core.probing import CallView, Statistic
from sinklab.core.registry import statistics
from sinklab.lab.cli import main


@statistics.register("largest_share")
class LargestShare(Statistic):
    """The share of a head's attention on the key that receives most."""

    axes = ("batch", "layer", "head")
    reads = ("received",)

    def measure(self, view: CallView) -> Tensor:
        received_BHS = view.shared["received"]
        return received_BHS.amax(-1) / received_BHS.sum(-1)


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__]))
