"""dLLM's block sampler, `BD3LMSampler`, on its own A2D model.

Its packages import trainers, data sets and trackers: they are entered by their folders, without
their `__init__`. The tokenizer is an object with the four ids that the sampler reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def prepare(settings: dict[str, Any]) -> Callable[[], tuple[list[int], int]]:
    for name in ("dllm", "dllm.core", "dllm.pipelines"):
        package = ModuleType(name)
        package.__path__ = [str(Path(settings["source"], *name.split(".")))]
        sys.modules[name] = package
    samplers = import_module("dllm.core.samplers")
    kind = import_module("dllm.pipelines.a2d").A2DQwen3LMHeadModel
    model = kind.from_pretrained(settings["checkpoint"], dtype=torch.float32).eval()
    evaluations = 0

    def count(module: Any, given: Any, named: dict[str, Any]) -> None:
        # the prefix is encoded with use_cache, and a step is not
        nonlocal evaluations
        evaluations += not named["use_cache"]

    model.register_forward_pre_hook(count, with_kwargs=True)
    # eos None: nothing ends a text; no token is the pad, which the sampler would leave out of
    # attention
    ids = {"mask_token_id": settings["mask_id"], "pad_token_id": settings["unused_id"]}
    tokenizer = SimpleNamespace(**ids, bos_token_id=None, eos_token_id=None)
    sampler = samplers.BD3LMSampler(model=model, tokenizer=tokenizer)
    new = settings["new_tokens"]
    config = samplers.BD3LMSamplerConfig(
        max_new_tokens=new, block_size=settings["block"], steps=new // settings["tokens_a_step"]
    )

    def run() -> tuple[list[int], int]:
        nonlocal evaluations
        evaluations = 0
        ids_BS = sampler.sample([settings["prompt"]], config, return_dict=False)
        return ids_BS[0, -new:].tolist(), evaluations

    return run


def version(settings: dict[str, Any]) -> str:
    return "dllm/core/samplers/bd3lm.py, dllm/pipelines/a2d/models/qwen3/modeling_qwen3.py"
