"""Ids, padding, canvases and a decoding that the tests of this folder share."""

# B batch, S sequence
import torch

from sinklab.core.instrument import intervene, trace
from sinklab.core.subject import Canvas, denoise, guided

IDS = torch.randint(1, 30, (2, 12), generator=torch.Generator().manual_seed(1))
TEXTS = [(IDS + 5 * t) % 49 + 1 for t in range(4)]
"""a text of each step"""
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, :4] = 0
EXACT = {"rtol": 1e-9, "atol": 1e-9}
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]


def canvas_of(model, prompts=PROMPTS, new_tokens=6):
    return Canvas.from_prompts(
        prompts, new_tokens=new_tokens, mask_id=model.config.mask_token_id, pad_id=0
    )


def padding(is_padded):
    """What a model is given beside the ids, and the real positions (B, S)."""
    if is_padded:
        return {"attention_mask": PADDED}, PADDED.bool()
    return {}, torch.ones_like(PADDED, dtype=torch.bool)


def decoded(
    model, canvas, *edits, cache=None, block_length=3, scale=0.0, forwards_per_step=1, **tracing
):
    """The steps of a decoding under these edits, its recording, and the log of the edits."""
    real_BS = None if bool(canvas.attention_BS.all()) else canvas.attention_BS
    denoiser = guided(model.denoiser(real_BS), scale, canvas.prompt_BS, canvas.mask_id)
    steps = []
    with (
        intervene(model, *edits, forwards_per_step=forwards_per_step) as log,
        trace(model, canvas=canvas, **tracing) as recording,
    ):
        for step in denoise(denoiser, canvas, cache=cache, block_length=block_length):
            recording.mark(step)
            steps.append(step)
    return steps, recording, log
