"""From `load` to a finding: what are the sinks of the packaged model, do they move, and what does
blocking them do?
"""

import numpy as np

import sinklab
from sinklab import Canvas, Excess, MaskSinks, denoise, find_sinks, intervene, trace
from sinklab.lab.analysis import enrichment, motion, token_classes

lm = sinklab.load("tiny")
prompt = lm.tokenizer(["The house stood at the end of a"])["input_ids"]
canvas = Canvas.from_prompts(prompt, new_tokens=24, mask_id=lm.model.config.mask_token_id)

with trace(lm.model) as recording:
    plain = [recording.mark(step) or step for step in denoise(lm.model.denoiser(), canvas)]
received, visible = recording.array("received")[:, 0], recording.array("visible")[:, 0, None, None]
sinks_TLHK = find_sinks(received, Excess(epsilon=3.0), visible)
print(
    f"{1 - sinks_TLHK.mean():.1%} of positions are filtered out by the rule; the paper says at "
    "least 96 %"
)

texts = [[lm.tokenizer.decode(token) for token in step.before_BS[0]] for step in plain]
masked = np.stack([step.masked_BS[0] for step in plain])
found = enrichment(token_classes(texts, np.where(masked, "mask", "")), sinks_TLHK.sum((1, 2)))
for kind, frequency, ratio in zip(found.label, found.frequency, found.enrichment, strict=True):
    print(
        f"{kind:12} {frequency:6.1%} of sink events, {ratio:.2f} times what its share of the "
        "canvas would give"
    )
print(
    "over all heads, mobility (0 is static):", round(motion(received, visible).overall.mobility, 2)
)

with intervene(lm.model, MaskSinks(k=5)) as log:
    *_, last = denoise(lm.model.denoiser(), canvas)
same = (last.ids_BS == plain[-1].ids_BS)[canvas.open_BS].float().mean()
print(
    f"blocking 5 keys a head ({log.summary()['held']:.0%} of attention) leaves {same:.0%} "
    "of the tokens as is"
)
