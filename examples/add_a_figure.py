"""A figure of your own, in one file: a function that draws runs on axes and returns the numbers.

``sinklab figures RUN --plugin add_a_figure.py`` draws it beside the figures of the package.
"""

import tempfile

from sinklab.lab.cli import main
from sinklab.lab.reports import figure, lines


@figure("sinks_and_norms")
def sinks_and_norms(runs, ax):
    """Do sinks that take much carry little? Attention on sinks, and their value norms over those of
    other text.
    """
    ax.axhline(100, color="gray", linestyle=":")
    curves = {
        "attention on sinks, %": "100 * absorbed",
        "their norm, %": "100 * sink_norm / rest_norm",
    }
    return lines(runs, ax, "layer", curves, "% of attention, of other text")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        main(["trace", "The house", "--new-tokens", "8", "--out", run])
        mine = ["--plugin", __file__, "--only", "sinks_and_norms"]
        raise SystemExit(main(["figures", run, *mine, "--out", f"{folder}/drawn"]))
