"""The conformance suite of rules, schedules and caches."""

# B rows, S positions
from typing import Any

import torch
from torch import Tensor

from sinklab.core.subject import Canvas, denoise
from sinklab.lab.checkpoints.loading import load

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], []]


def _written(model: Any, prompts: list[list[int]], **how: Any) -> tuple[Any, Tensor]:
    """Ids of nine new tokens, and how often each was committed."""
    mask_id, source = model.config.mask_token_id, torch.Generator().manual_seed(0)
    canvas = Canvas.from_prompts(prompts, new_tokens=9, mask_id=mask_id, pad_id=0)
    denoiser = model.denoiser(canvas.attention_mask)
    times_BS = torch.zeros_like(canvas.ids_BS)
    for step in denoise(denoiser, canvas, block_length=3, generator=source, **how):
        times_BS += step.committed_BS
    return step.ids_BS[:, -9:].tolist(), times_BS[:, -9:]


def check_decoding(option: str, value: Any) -> None:
    """An unmasking rule or a schedule commits each position once, a cache writes the same text if
    everything is computed at each step; without draws a row does not depend on the others.
    """
    model = load("tiny").model.double()
    if option == "cache" and value.is_exact:
        # a cache for attention in blocks
        model.config.block_length = 3
    elif option == "cache":
        whole = _written(model, PROMPTS, cache=value, steps=3)[0]
        assert whole == _written(model, PROMPTS, steps=3)[0], (
            "with one evaluation a block it writes another text than no cache"
        )
    rows, times_BS = _written(model, PROMPTS, **{option: value})
    assert (times_BS == 1).all(), "it does not commit each position once"
    if not getattr(value, "draws", False):
        alone = [_written(model, [prompt], **{option: value})[0][0] for prompt in PROMPTS]
        assert alone == rows, "a row of a batch depends on the others"
