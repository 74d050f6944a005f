"""A figure of your own, in one file: declared over the table of facts, drawn wherever the lab draws
figures.

``sinklab figures RUN --plugin examples/add_a_figure.py`` draws it beside the figures of the
package.
"""

import sys
import tempfile
from pathlib import Path

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
    from sinklab import open_run
    from sinklab.lab.cli import main
    from sinklab.lab.reports import draw_all

    with tempfile.TemporaryDirectory() as folder:
        run = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/run"
        if not Path(run).exists():
            main(["trace", "The house", "--new-tokens", "8", "--out", run])
        drawn = draw_all(open_run(run), f"{folder}/figures", ("png",), names=["sinks_and_norms"])
        assert drawn.written and drawn.written[0].is_file(), drawn.skipped
        print(f"{sinks_and_norms.name}: {drawn.written[0].stat().st_size} bytes")
