"""A statistic of your own: how much of a head's attention the key holds that receives most.

It says what it reads and which axes it has; the trace computes it beside the others, in one pass
over the scores, step by step, for the layers and heads that are recorded. Of a frozen dataclass the
fields are options: largest_share:k=3. ``sinklab trace "The sea" --plugin add_a_statistic.py
--statistics largest_share`` keeps it in a run folder.
"""

from torch import Tensor

import sinklab
from sinklab import Canvas, denoise, trace
from sinklab.core.probing import CallView, Statistic
from sinklab.core.registry import statistics


@statistics.register("largest_share")
class LargestShare(Statistic):
    """The share of a head's attention on the key that receives most."""

    axes = ("batch", "layer", "head")
    reads = ("received",)

    def measure(self, view: CallView) -> Tensor:
        received_BHS = view.shared["received"]
        return received_BHS.amax(-1) / received_BHS.sum(-1)


if __name__ == "__main__":
    lm = sinklab.load("tiny")
    prompt = lm.tokenizer(["The house stood at the end of a"])["input_ids"]
    canvas = Canvas.from_prompts(prompt, new_tokens=8, mask_id=lm.model.config.mask_token_id)
    with trace(lm.model, ("received", "largest_share")) as recording:
        for step in denoise(lm.model.denoiser(), canvas):
            recording.mark(step)
    share, received = recording.array("largest_share"), recording.array("received")
    assert recording.dims("largest_share") == ("step", "batch", "layer", "head")
    assert abs(share - received.max(-1) / received.sum(-1)).max() < 1e-6
    print("largest share of a head, mean over steps:", share.mean((0, 1)).round(2).tolist())
