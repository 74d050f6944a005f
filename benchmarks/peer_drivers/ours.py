"""Our side of a pair: `generate` of the same folder; attention in blocks has the committed cache
unasked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sinklab.core.subject import Canvas, DecodingSettings
from sinklab.lab.checkpoints import load


def prepare(settings: dict[str, Any]) -> Callable[[], tuple[list[int], int]]:
    block, new, cache = settings["block"], settings["new_tokens"], settings["cache"]
    known = {"mask_token_id": settings["mask_id"]} | (
        {"block_length": block} if cache == "committed" else {}
    )
    model = load(
        settings["checkpoint"], dtype=settings["dtype"], device=settings["device"], **known
    ).model
    prompt = torch.tensor([settings["prompt"]], device=settings["device"])
    how = (
        {}
        if cache == "committed"
        else {"block_length": block, "cache": None if cache == "none" else cache}
    )
    decoding = DecodingSettings(steps=new // settings["tokens_a_step"], **how)
    canvas = Canvas.from_prompts(prompt, new_tokens=new, mask_id=settings["mask_id"])
    evaluations = len(list(model.denoise(canvas, decoding)))

    def run() -> tuple[list[int], int]:
        ids_BS = model.generate(prompt, max_new_tokens=new, settings=decoding)
        return ids_BS[0, len(settings["prompt"]) :].tolist(), evaluations

    return run


def version(settings: dict[str, Any]) -> str:
    return "sinklab"
