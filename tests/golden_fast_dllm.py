"""Fast-dLLM's golden cases: what was asked, and every canvas. Shared by tests of rules and
caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from golden import golden_case, golden_cases, tensors_of
from sinklab.core.sampling import Canvas, Factor, Threshold

# B batch rows, S positions, T evaluations

PLAIN = (
    *("plain_quota_a", "plain_threshold_a", "plain_quota_b", "plain_threshold_b", "plain_factor_b"),
    *("plain_threshold_low_b", "plain_factor_small_b", "plain_threshold_batch_b"),
)
PREFIX = (
    *(
        "prefix_quota_a",
        "prefix_threshold_a",
        "prefix_quota_b",
        "prefix_threshold_b",
        "prefix_factor_b",
    ),
    "prefix_threshold_low_b",
)
DUAL = (
    *("dual_quota_a", "dual_threshold_a", "dual_quota_b", "dual_threshold_b", "dual_factor_b"),
    *("dual_factor_large_b", "dual_threshold_batch_b", "dual_threshold_low_b"),
)
IDLE = ("prefix_threshold_low_a", "dual_threshold_low_a")
"""Revision a spends one evaluation more on a block that its first one has finished; b mended
that.
"""
FUNCTIONS = {
    "generate": "none",
    "generate_with_prefix_cache": "prefix",
    "generate_with_dual_cache": "dual",
}


@dataclass(frozen=True)
class FastDLLMCase:
    """One stored run."""

    canvas: Canvas
    cache: str
    """Name of our cache for the original's function."""
    arguments: dict[str, Any]
    """For `denoise`: schedule, steps, block_length."""
    canvases_TBS: Tensor
    """The canvas before the first evaluation and after each."""
    confidence_TBS: Tensor
    """What the original selected by; -inf where it was no candidate."""
    nfe: int


def fast_dllm_case(name):
    """The case of this name; skips the calling test where the golden data are not at hand."""
    case, tensors = (
        golden_case("fast_dllm", "generate", name),
        tensors_of("fast_dllm", f"gen.{name}."),
    )
    settings = case["settings"]
    arguments = {"block_length": settings["block_length"]}
    if settings.get("factor") is not None:
        arguments["schedule"] = Factor(settings["factor"])
    elif settings["threshold"] is not None:
        arguments["schedule"] = Threshold(settings["threshold"])
    else:
        arguments["steps"] = settings["steps"]
    return FastDLLMCase(
        Canvas.from_prompts(
            tensors["prompt"],
            new_tokens=settings["gen_length"],
            mask_id=golden_cases("fast_dllm")["special_ids"]["mask"],
        ),
        FUNCTIONS[case["function"]],
        arguments,
        tensors["canvas"],
        tensors["confidence"],
        case["nfe"],
    )
