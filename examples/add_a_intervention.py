"""An intervention of your own: attention at another temperature.

One method is all there is to it: it gets an attention call, and returns the one to make. To take
keys away, write a selector in its place (`add_a_selector.py`). `--plugin add_a_intervention.py`
makes it an edit of every command.
"""

from dataclasses import dataclass, replace

import sinklab
from sinklab import Canvas, denoise, intervene, trace
from sinklab.core.probing import AttentionCall, CallSite, LayerIntervention
from sinklab.core.registry import interventions


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
    lm = sinklab.load("tiny")
    prompt = lm.tokenizer(["The house stood at the end of a"])["input_ids"]
    canvas = Canvas.from_prompts(prompt, new_tokens=8, mask_id=lm.model.config.mask_token_id)
    entropies = []
    for edits in ([], ["temper:temperature=4"]):
        with intervene(lm.model, *edits), trace(lm.model, ("row_entropy",)) as recording:
            steps = list(denoise(lm.model.denoiser(), canvas))
        entropies.append(float(recording.array("row_entropy")[0].mean()))
    assert entropies[1] > entropies[0]
    print(len(steps), "steps; mean entropy of a row:", entropies)
