"""SDAR's `generate.py` on its own model, with what only CUDA has replaced.

`flash_attn`'s RMSNorm by the one that the model's file keeps beside it, its attention by
`scaled_dot_product_attention` (which the file itself uses for prompts), the fused training loss by
nothing; tokens are the most probable ones in place of drawn ones (`torch.multinomial` by `argmax`):
with `top_k=1` its confidences would all be 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MODEL = Path("training", "model", "SDAR-4B-Chat")


def rms_norm(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def attention(
    q_BWHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, causal: bool, softmax_scale: float
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BWHD, k_BKGD, v_BKGD))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def stand_in(name: str, **content: Any) -> None:
    """Modules of this dotted name, the last one with this content."""
    parts = name.split(".")
    for above in (".".join(parts[: length + 1]) for length in range(len(parts))):
        module = sys.modules.setdefault(above, ModuleType(above))
        # transformers asks of some names whether they are there
        module.__spec__ = module.__spec__ or ModuleSpec(above, None)
    vars(sys.modules[name]).update(content)


def prepare(settings: dict[str, Any]) -> Callable[[], tuple[list[int], int]]:
    source = Path(settings["source"])
    stand_in("flash_attn", flash_attn_func=attention, flash_attn_varlen_func=None)
    stand_in("flash_attn.bert_padding", index_first_axis=None, pad_input=None, unpad_input=None)
    stand_in("flash_attn.ops.triton.layer_norm", rms_norm_fn=rms_norm)
    package = ModuleType("sdar_model")
    package.__path__ = [str(source / MODEL)]
    sys.modules["sdar_model"] = package
    stand_in(
        "sdar_model.fused_linear_diffusion_cross_entropy", FusedLinearDiffusionCrossEntropyLoss=None
    )
    sys.path.insert(0, str(source))
    loop = import_module("generate")
    kind = import_module("sdar_model.modeling_sdar").SDARForCausalLM
    model = kind.from_pretrained(settings["checkpoint"], torch_dtype=torch.float32).eval()
    torch.multinomial = lambda probs, num_samples: probs.argmax(-1, keepdim=True)
    evaluations = 0

    def count(module: Any, given: Any, named: dict[str, Any]) -> None:
        # a call that stores keys and values is no step
        nonlocal evaluations
        evaluations += not named["store_kv"]

    model.register_forward_pre_hook(count, with_kwargs=True)
    prompt = {"input_ids": torch.tensor([settings["prompt"]])}
    how = {
        "mask_id": settings["mask_id"],
        "gen_length": settings["new_tokens"],
        "block_length": settings["block"],
        "denoising_steps": settings["block"] // settings["tokens_a_step"],
        "remasking_strategy": "low_confidence_static",
    }

    def run() -> tuple[list[int], int]:
        nonlocal evaluations
        evaluations = 0
        ids_BS = loop.block_diffusion_generate(model, prompt, **how)
        return ids_BS[0, len(settings["prompt"]) :].tolist(), evaluations

    return run


def version(settings: dict[str, Any]) -> str:
    return f"generate.py, {MODEL.as_posix()}/modeling_sdar.py"
