"""A selector of your own: the keys that many heads of a layer call a sink.

One method is all there is to it, over one view of an attention call (`KeyView`); its fields are its
options. `--plugin add_a_selector.py` makes it a choice of every command that takes edits.
"""

from dataclasses import dataclass

from torch import Tensor

import sinklab
from sinklab import Canvas, Excess, denoise, intervene, trace
from sinklab.core.probing import KeyView, Selector
from sinklab.core.registry import registered, rules, selectors
from sinklab.core.sinks import Rule


@selectors.register("shared_sinks")
@dataclass(frozen=True)
class SharedSinks(Selector):
    """The keys that a rule calls sinks in at least this share of the heads."""

    share: float = 0.5
    rule: Rule = registered(rules, Excess(epsilon=3.0))  # noqa: RUF009

    def select(self, view: KeyView) -> Tensor:
        shares_B1S = view.sinks(self.rule).float().mean(1, keepdim=True)
        return view.free_BHS & (shares_B1S >= self.share)


if __name__ == "__main__":
    lm = sinklab.load("tiny")
    prompt = lm.tokenizer(["The house stood at the end of a"])["input_ids"]
    canvas = Canvas.from_prompts(prompt, new_tokens=8, mask_id=lm.model.config.mask_token_id)
    edit = "block_keys:keys=shared_sinks:share=0.25,when=now"
    with intervene(lm.model, edit) as log, trace(lm.model) as recording:
        steps = list(denoise(lm.model.denoiser(), canvas))
    for removal, received_BLHS in zip(log.removals, recording.received, strict=True):
        blocked = removal.columns_BLHM >= 0
        assert not received_BLHS.gather(-1, removal.columns_BLHM.clamp(min=0))[blocked].any()
    print(len(steps), "steps:", log.summary())
