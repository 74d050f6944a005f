"""An intervention of your own: attention at another temperature.

A function is all there is to it: it gets an attention call, and returns the one to make. To take
keys away, write a selector in its place (`add_a_selector.py`). `--plugin add_a_intervention.py`
makes it an edit of every command; ``sinklab check add_a_intervention.py`` says whether it keeps
what edits promise.
"""

from dataclasses import replace

from sinklab.core.registry import interventions
from sinklab.lab.cli import main


@interventions.register("temper")
def temper(call, temperature=2.0):
    """Divide the scores of these layers and heads by a temperature."""
    q_BHQD = call.q_BHQD.clone()
    q_BHQD[:, call.heads] /= temperature
    return replace(call, q_BHQD=q_BHQD)


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__]))
