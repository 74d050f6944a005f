"""Fast-dLLM's loop for LLaDA as dLLM has it (`FastdLLMLLaDASampler`), without a cache, with a
prefix and a dual cache.

Its packages import trainers, data sets and trackers: they are entered by their folders, without
their `__init__`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open


def prepare(settings: dict[str, Any]) -> Callable[[], tuple[list[int], int]]:
    for name in (
        "dllm",
        "dllm.core",
        "dllm.core.samplers",
        "dllm.pipelines",
        "dllm.pipelines.llada",
    ):
        _entered(name, settings["source"])
    for name in (
        "dllm.pipelines.llada.models",
        "dllm.pipelines.fastdllm",
        "dllm.pipelines.fastdllm.llada",
    ):
        _entered(name, settings["source"])
    sampler_of = import_module("dllm.pipelines.fastdllm.llada.sampler")
    models = import_module("dllm.pipelines.fastdllm.llada.models")
    fields = json.loads(Path(settings["checkpoint"], "config.json").read_text())
    unused = ("architectures", "model_type", "torch_dtype")
    config = models.FastdLLMLLaDAConfig(
        **{key: value for key, value in fields.items() if key not in unused}
    )
    config.init_device = device = settings["device"]
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    model = models.FastdLLMLLaDAModelLM(config, init_params=False).eval().to(device)
    torch.set_default_dtype(torch.float32)
    _filled(model, Path(settings["checkpoint"]))
    new = settings["new_tokens"]
    ids = {"mask_token_id": settings["mask_id"], "pad_token_id": settings["unused_id"]}
    tokenizer = SimpleNamespace(**ids, bos_token_id=None, eos_token_id=settings["unused_id"])
    sampler = sampler_of.FastdLLMLLaDASampler(model=model, tokenizer=tokenizer)
    chosen = sampler_of.FastdLLMLLaDASamplerConfig(
        max_new_tokens=new,
        block_size=settings["block"],
        steps=new // settings["tokens_a_step"],
        use_cache=settings["cache"],
        return_dict=False,
    )
    evaluations = 0

    def count(*given: Any) -> None:
        nonlocal evaluations
        evaluations += 1

    model.register_forward_pre_hook(count)

    def run() -> tuple[list[int], int]:
        nonlocal evaluations
        evaluations = 0
        ids_BS = sampler.sample([settings["prompt"]], chosen)
        return ids_BS[0, -new:].tolist(), evaluations

    return run


def _entered(name: str, source: str) -> None:
    package = ModuleType(name)
    package.__path__ = [str(Path(source, *name.split(".")))]
    sys.modules[name] = package


def _filled(model: Any, folder: Path) -> None:
    """The weights of the folder, read as they are; every one must have its place."""
    there = dict(model.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors, torch.no_grad():
            for name in tensors.keys():  # noqa: SIM118 (no dict)
                there.pop(name).copy_(tensors.get_tensor(name))
    assert not there, f"no weights for {sorted(there)}"


def version(settings: dict[str, Any]) -> str:
    return "dllm/pipelines/fastdllm/llada/{sampler,models/modeling_llada}.py"
