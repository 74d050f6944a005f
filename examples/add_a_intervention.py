"""An intervention of your own: hide from all heads the keys that many of them call a sink.

One class is all there is to it: what it selects. Its fields are its options, and those of
`KeyIntervention` (layers, heads, removal, source, …) come with it: `--plugin add_a_intervention.py`
makes it an edit of every command.
"""

from dataclasses import dataclass

from torch import Tensor

import sinklab
from sinklab import Canvas, Excess, denoise, intervene, trace
from sinklab.core.probing import KeyIntervention, KeyScores
from sinklab.core.registry import interventions, of, rules
from sinklab.core.sinks.rules import Rule


@interventions.register("mask_shared_sinks")
@dataclass(frozen=True)
class MaskSharedSinks(KeyIntervention):
    """Hide the keys that a rule calls sinks in at least this share of the heads."""

    share: float = 0.5
    rule: Rule = of(rules, Excess(epsilon=3.0))  # noqa: RUF009

    def select(self, keys: KeyScores) -> Tensor:
        return keys.sinks(self.rule).float().mean(1, keepdim=True) >= self.share


if __name__ == "__main__":
    lm = sinklab.load("tiny")
    prompt = lm.tokenizer(["The house stood at the end of a"])["input_ids"]
    canvas = Canvas.from_prompts(prompt, new_tokens=8, mask_id=lm.model.config.mask_token_id)
    with (
        intervene(lm.model, interventions.parse("mask_shared_sinks:share=0.25")) as log,
        trace(lm.model) as recording,
    ):
        steps = list(denoise(lm.model.denoiser(), canvas))
    for removal, received_BLHS in zip(log.removals, recording.received, strict=True):
        hidden = removal.columns_BLHM >= 0
        assert not received_BLHS.gather(-1, removal.columns_BLHM.clamp(min=0))[hidden].any()
    print(len(steps), "steps:", log.summary())
