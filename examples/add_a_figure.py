"""A figure of your own, in one file: declared over the table of facts, drawn wherever the lab draws
figures.

``sinklab figures RUN --plugin add_a_figure.py`` draws it beside the figures of the package, and
``sinklab check add_a_figure.py --on RUN`` says whether it can be drawn.
"""

import tempfile

from sinklab.lab.cli import main
from sinklab.lab.reports import Curve, figure


@figure(
    "sinks_and_norms",
    x="layer",
    y=(
        Curve("100 * absorbed", "attention on sinks, %"),
        Curve("100 * sink_norm / rest_norm", "their norm, %", "--"),
    ),
    label="% of attention, of other text",
    needs="attention",
)
def sinks_and_norms(axes, look):
    """Do sinks that take much carry little? Attention on sinks, and their value norms over those of
    other text.
    """
    axes.axhline(100, color=look.muted, linestyle=":")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(["trace", "The house", "--new-tokens", "8", "--out", f"{folder}/run"])
        raise SystemExit(main(["check", __file__, "--on", f"{folder}/run"]))
