"""An intervention of your own: attention at another temperature.

One method is all there is to it: it gets an attention call, and returns the one to make. To take
keys away, write a selector in its place (`add_a_selector.py`). `--plugin add_a_intervention.py`
makes it an edit of every command; ``sinklab check add_a_intervention.py`` says whether it keeps
what edits promise.
"""

from dataclasses import dataclass, replace

from sinklab.core.probing import AttentionCall, CallSite, LayerIntervention
from sinklab.core.registry import interventions
from sinklab.lab.cli import main


@interventions.register("temper")
@dataclass(frozen=True)
class Temper(LayerIntervention):
    """Divide the scores of these layers and heads by a temperature."""

    temperature: float = 2.0

    def edit(self, call: AttentionCall, site: CallSite) -> AttentionCall:
        query_BHQD = call.query_BHQD.clone()
        query_BHQD[:, site.heads] /= self.temperature
        return replace(call, query_BHQD=query_BHQD)


if __name__ == "__main__":
    raise SystemExit(main(["check", __file__]))
